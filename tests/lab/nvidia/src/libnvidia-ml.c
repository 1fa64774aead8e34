/* libnvidia-ml.so.1 of the double: NVML over the driver of the double. Which device node it needs, and what each
 * missing one answers, is that of tests/ground_truth/nvidia; structures are those pynvml declares. */
#include "client.h"

#include <ctype.h>
#include <pthread.h>
#include <strings.h>
#include <sys/eventfd.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_GPUS 64

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, OPERATING_SYSTEM = 17, VERSION_MISMATCH = 18,
    ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999,
};

struct device {
    int row;   /* which of the driver's GPUs */
    int minor;
    int index; /* which of those this process may use */
    char uuid[64], bus[32], serial[32];
};

static struct device devices[MAX_GPUS];
static int ndevices, users, control = -1, fds[MAX_GPUS * 3 + 16], nfds;
static char *cached;
static struct timespec cached_at;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int keep(int fd)
{
    if (fd >= 0 && nfds < (int)(sizeof fds / sizeof *fds))
        fds[nfds++] = fd;
    return fd;
}

static void close_all(void)
{
    while (nfds)
        close(fds[--nfds]);
    control = -1;
    ndevices = 0;
    free(cached);
    cached = NULL;
}

/* The driver's state, at most some milliseconds old. */
static const char *state(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    long long age = (now.tv_sec - cached_at.tv_sec) * 1000000000LL + now.tv_nsec - cached_at.tv_nsec;
    if (!cached || age > 3000000) {
        free(cached);
        cached = nv_call(control, "state");
        cached_at = now;
    }
    return cached;
}

static void forget(void)
{
    free(cached);
    cached = NULL;
}

static char *key_of(const struct device *device, const char *what)
{
    static __thread char key[96];
    snprintf(key, sizeof key, "gpu.%d.%s", device->row, what);
    return key;
}

static long long number(const struct device *device, const char *what)
{
    return nv_number(state(), key_of(device, what), 0);
}

static int text(const struct device *device, const char *what, char *into, unsigned room)
{
    char value[256];
    if (!into)
        return INVALID_ARGUMENT;
    nv_find(state(), key_of(device, what), value, sizeof value);
    if (strlen(value) >= room)
        return INSUFFICIENT_SIZE;
    strcpy(into, value);
    return SUCCESS;
}

static int from_errno(int error)
{
    switch (error) {
    case ENOENT: case ENXIO: case ENODEV: return DRIVER_NOT_LOADED;
    case EACCES: return NO_PERMISSION;
    case ENOTTY: case EINVAL: return OPERATING_SYSTEM;
    default: return UNKNOWN;
    }
}

/* Events and pipes a client of the driver has once in a process, whether it gets to the driver or not. */
static void client_fds(void)
{
    static int done;
    int pair[2];
    if (done++)
        return;
    for (int i = 0; i < 2; i++)
        if (eventfd(0, EFD_CLOEXEC) < 0 || pipe2(pair, O_CLOEXEC))
            return;
}

static int initialise(void)
{
    char own[64], driver[64];
    client_fds();
    nv_prepare(255);
    nv_make_capability_node("/proc/driver/nvidia/capabilities/mig/config");
    nv_make_capability_node("/proc/driver/nvidia/capabilities/mig/monitor");
    int fd = nv_open("/dev/nvidiactl");
    if (fd < 0)
        return from_errno(-fd);
    control = keep(fd);
    if (!state())
        return UNKNOWN;
    nv_own_version(own, sizeof own);
    nv_find(state(), "version", driver, sizeof driver);
    if (strcmp(own, driver)) {
        free(nv_call(control, "mismatch %s", own));
        return VERSION_MISMATCH;
    }
    int present = (int)nv_number(state(), "gpus", 0);
    for (int row = 0; row < present && ndevices < MAX_GPUS; row++) {
        struct device *device = &devices[ndevices];
        *device = (struct device){.row = row, .index = ndevices};
        device->minor = (int)number(device, "minor");
        text(device, "uuid", device->uuid, sizeof device->uuid);
        text(device, "bus", device->bus, sizeof device->bus);
        text(device, "serial", device->serial, sizeof device->serial);
        nv_prepare(device->minor);
        int gpu = nv_open_gpu(device->minor);
        if (gpu == -EIO && number(device, "lost")) { /* still known, but every question about it is refused */
            ndevices++;
            continue;
        }
        if (gpu < 0)
            continue;
        keep(gpu);
        ndevices++;
    }
    /* What else a real one opens. None of it is missed. */
    nv_make_uvm_nodes(0);
    keep(open("/dev/nvidia-uvm", O_RDWR | O_CLOEXEC));
    keep(open("/dev/nvidia-caps/nvidia-cap1", O_RDONLY | O_CLOEXEC));
    keep(open("/dev/nvidia-caps/nvidia-cap2", O_RDONLY | O_CLOEXEC));
    keep(open("/dev/nvidia-uvm", O_RDWR | O_CLOEXEC));
    for (int i = 0; i < ndevices; i++) {
        int one = nv_open_gpu(devices[i].minor), other = one < 0 ? -1 : nv_open_gpu(devices[i].minor);
        if (other < 0 && one >= 0)
            close(one);
        else if (other >= 0) {
            keep(one);
            keep(other);
        }
    }
    return SUCCESS;
}

EXPORT int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    int code = SUCCESS;
    pthread_mutex_lock(&lock);
    if (users == 0 && (code = initialise()))
        close_all();
    if (!code)
        users++;
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT int nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

EXPORT int nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

EXPORT int nvmlShutdown(void)
{
    int code = SUCCESS;
    pthread_mutex_lock(&lock);
    if (users == 0)
        code = UNINITIALIZED;
    else if (--users == 0)
        close_all();
    pthread_mutex_unlock(&lock);
    return code;
}

EXPORT const char *nvmlErrorString(int code)
{
    static const struct {
        int code;
        const char *text;
    } known[] = {
        {0, "Success"}, {1, "Uninitialized"}, {2, "Invalid Argument"}, {3, "Not Supported"},
        {4, "Insufficient Permissions"}, {5, "Already Initialized"}, {6, "Not Found"}, {7, "Insufficient Size"},
        {8, "Insufficient External Power"}, {9, "Driver Not Loaded"}, {10, "Timeout"},
        {11, "Interrupt Request Issue"}, {12, "NVML Shared Library Not Found"}, {13, "Function Not Found"},
        {14, "Corrupted infoROM"}, {15, "GPU is lost"}, {16, "GPU requires restart"},
        {17, "The operating system has blocked the request."}, {18, "Driver/library version mismatch"},
        {19, "In use by another client"}, {20, "Insufficient Memory"}, {21, "No data"},
        {25, "Argument version mismatch"}, {999, "Unknown Error"},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i].code == code)
            return known[i].text;
    return "Unknown Error";
}

#define READY        \
    if (users == 0)  \
        return UNINITIALIZED;

static struct device *device_of(void *handle)
{
    struct device *device = handle;
    return device >= devices && device < devices + ndevices ? device : NULL;
}

#define DEVICE(handle)                             \
    READY                                          \
    struct device *device = device_of(handle);     \
    if (!device)                                   \
        return INVALID_ARGUMENT;                   \
    if (!state())                                  \
        return UNKNOWN;                            \
    if (number(device, "lost"))                    \
        return GPU_IS_LOST;

/* ---- the system ---- */

static int copied(const char *from, char *into, unsigned room)
{
    if (!into)
        return INVALID_ARGUMENT;
    if (strlen(from) >= room)
        return INSUFFICIENT_SIZE;
    strcpy(into, from);
    return SUCCESS;
}

EXPORT int nvmlSystemGetDriverVersion(char *version, unsigned room)
{
    char found[64];
    READY
    nv_find(state(), "version", found, sizeof found);
    return copied(found, version, room);
}

EXPORT int nvmlSystemGetNVMLVersion(char *version, unsigned room)
{
    char own[64];
    nv_own_version(own, sizeof own);
    char whole[80];
    snprintf(whole, sizeof whole, "%d.%s", nv_cuda_version(own) / 1000, own);
    return copied(whole, version, room);
}

EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    char own[64];
    if (!version)
        return INVALID_ARGUMENT;
    nv_own_version(own, sizeof own);
    *version = nv_cuda_version(own);
    return SUCCESS;
}

EXPORT int nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

EXPORT int nvmlSystemGetProcessName(unsigned pid, char *name, unsigned room)
{
    char path[64], line[4096];
    READY
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return NOT_FOUND;
    size_t got = fread(line, 1, sizeof line - 1, file);
    fclose(file);
    line[got] = 0;
    snprintf(name, room, "%s", line);
    return SUCCESS;
}

/* ---- finding devices ---- */

EXPORT int nvmlDeviceGetCount_v2(unsigned *count)
{
    READY
    if (!count)
        return INVALID_ARGUMENT;
    *count = (unsigned)ndevices;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetCount(unsigned *count)
{
    return nvmlDeviceGetCount_v2(count);
}

static int found(struct device *device, void **handle)
{
    if (!state())
        return UNKNOWN;
    if (number(device, "lost"))
        return GPU_IS_LOST;
    *handle = device;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    READY
    if (!handle || index >= (unsigned)ndevices)
        return INVALID_ARGUMENT;
    return found(&devices[index], handle);
}

EXPORT int nvmlDeviceGetHandleByIndex(unsigned index, void **handle)
{
    return nvmlDeviceGetHandleByIndex_v2(index, handle);
}

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    READY
    if (!uuid || !handle)
        return INVALID_ARGUMENT;
    for (int i = 0; i < ndevices; i++)
        if (!strcasecmp(uuid, devices[i].uuid))
            return found(&devices[i], handle);
    return NOT_FOUND;
}

EXPORT int nvmlDeviceGetHandleBySerial(const char *serial, void **handle)
{
    READY
    if (!serial || !handle)
        return INVALID_ARGUMENT;
    for (int i = 0; i < ndevices; i++)
        if (!strcmp(serial, devices[i].serial))
            return found(&devices[i], handle);
    return NOT_FOUND;
}

EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *address, void **handle)
{
    unsigned wanted[4] = {0}, have[4];
    READY
    if (!address || !handle)
        return INVALID_ARGUMENT;
    if (sscanf(address, "%x:%x:%x.%x", &wanted[0], &wanted[1], &wanted[2], &wanted[3]) < 3 &&
        (wanted[0] = 0, sscanf(address, "%x:%x.%x", &wanted[1], &wanted[2], &wanted[3]) < 2))
        return INVALID_ARGUMENT;
    for (int i = 0; i < ndevices; i++)
        if (sscanf(devices[i].bus, "%x:%x:%x.%x", &have[0], &have[1], &have[2], &have[3]) == 4 &&
            !memcmp(wanted, have, sizeof wanted))
            return found(&devices[i], handle);
    return NOT_FOUND;
}

EXPORT int nvmlDeviceGetHandleByPciBusId(const char *address, void **handle)
{
    return nvmlDeviceGetHandleByPciBusId_v2(address, handle);
}

/* ---- what a device says of itself ---- */

#define TEXT(function, key)                                             \
    EXPORT int function(void *handle, char *into, unsigned room)        \
    {                                                                   \
        DEVICE(handle)                                                  \
        return text(device, key, into, room);                           \
    }

#define NUMBER(function, type, key, factor)                             \
    EXPORT int function(void *handle, type *into)                       \
    {                                                                   \
        DEVICE(handle)                                                  \
        if (!into)                                                      \
            return INVALID_ARGUMENT;                                    \
        *into = (type)(number(device, key) * (factor));                 \
        return SUCCESS;                                                 \
    }

TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetUUID, "uuid")
TEXT(nvmlDeviceGetSerial, "serial")
TEXT(nvmlDeviceGetVbiosVersion, "video_bios")
TEXT(nvmlDeviceGetBoardPartNumber, "board_part")
NUMBER(nvmlDeviceGetMinorNumber, unsigned, "minor", 1)
NUMBER(nvmlDeviceGetBrand, unsigned, "brand_number", 1)
NUMBER(nvmlDeviceGetArchitecture, unsigned, "nvml_architecture", 1)
NUMBER(nvmlDeviceGetModuleId, unsigned, "module_id", 1)
NUMBER(nvmlDeviceGetPowerUsage, unsigned, "power_mw", 1)
NUMBER(nvmlDeviceGetPowerManagementLimit, unsigned, "power_limit_mw", 1)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, unsigned, "power_limit_mw", 1)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, "power_default_mw", 1)
NUMBER(nvmlDeviceGetPersistenceMode, unsigned, "persistence", 1)
NUMBER(nvmlDeviceGetComputeMode, unsigned, "compute_mode", 1)
NUMBER(nvmlDeviceGetPerformanceState, unsigned, "pstate", 1)
NUMBER(nvmlDeviceGetPowerState, unsigned, "pstate", 1)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, "link_generation", 1)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, "link_generation_max", 1)
NUMBER(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned, "link_generation_max", 1)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, unsigned, "link_width", 1)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, unsigned, "link_width_max", 1)
NUMBER(nvmlDeviceGetDisplayMode, unsigned, "none", 0)
NUMBER(nvmlDeviceGetDisplayActive, unsigned, "none", 0)
NUMBER(nvmlDeviceGetAccountingMode, unsigned, "none", 0)
NUMBER(nvmlDeviceGetMultiGpuBoard, unsigned, "none", 0)
NUMBER(nvmlDeviceGetPcieReplayCounter, unsigned, "none", 0)

EXPORT int nvmlDeviceGetIndex(void *handle, unsigned *index)
{
    DEVICE(handle)
    *index = (unsigned)device->index;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetBoardId(void *handle, unsigned *board)
{
    unsigned domain = 0, bus = 0;
    DEVICE(handle)
    (void)sscanf(device->bus, "%x:%x", &domain, &bus);
    *board = bus << 8;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor)
{
    char value[32];
    DEVICE(handle)
    text(device, "compute", value, sizeof value);
    return sscanf(value, "%d.%d", major, minor) == 2 ? SUCCESS : UNKNOWN;
}

EXPORT int nvmlDeviceGetNumGpuCores(void *handle, unsigned *cores)
{
    DEVICE(handle)
    *cores = (unsigned)number(device, "cores");
    return SUCCESS;
}

#define MIB(x) ((unsigned long long)(x) << 20)

EXPORT int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory)
{
    DEVICE(handle)
    /* The first version counts what the driver keeps for itself as used. */
    unsigned long long total = MIB(number(device, "memory_mib")), reserved = (unsigned long long)number(device, "reserved_bytes"),
                       used = (unsigned long long)number(device, "used_bytes");
    memory[0] = total;
    memory[1] = total - reserved - used;
    memory[2] = reserved + used;
    return SUCCESS;
}

struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

EXPORT int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *memory)
{
    DEVICE(handle)
    if (!memory)
        return INVALID_ARGUMENT;
    if (memory->version != (sizeof *memory | 2u << 24))
        return ARGUMENT_VERSION_MISMATCH;
    memory->total = MIB(number(device, "memory_mib"));
    memory->reserved = (unsigned long long)number(device, "reserved_bytes");
    memory->used = (unsigned long long)number(device, "used_bytes");
    memory->free = memory->total - memory->reserved - memory->used;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetBAR1MemoryInfo(void *handle, unsigned long long *memory)
{
    DEVICE(handle)
    memory[0] = MIB(number(device, "bar1_mib"));
    memory[2] = MIB(1) + (unsigned long long)number(device, "used_bytes");
    memory[1] = memory[0] - memory[2];
    return SUCCESS;
}

EXPORT int nvmlDeviceGetUtilizationRates(void *handle, unsigned *rates)
{
    DEVICE(handle)
    rates[0] = rates[1] = 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetEncoderUtilization(void *handle, unsigned *rate, unsigned *period)
{
    DEVICE(handle)
    *rate = 0;
    *period = 167000;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetDecoderUtilization(void *handle, unsigned *rate, unsigned *period)
{
    return nvmlDeviceGetEncoderUtilization(handle, rate, period);
}

EXPORT int nvmlDeviceGetPowerManagementLimitConstraints(void *handle, unsigned *least, unsigned *greatest)
{
    DEVICE(handle)
    *least = (unsigned)number(device, "power_min_mw");
    *greatest = (unsigned)number(device, "power_max_mw");
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules)
{
    DEVICE(handle)
    *millijoules = (unsigned long long)number(device, "energy_mj");
    return SUCCESS;
}

EXPORT int nvmlDeviceGetPowerManagementMode(void *handle, unsigned *mode)
{
    DEVICE(handle)
    *mode = 1;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *celsius)
{
    DEVICE(handle)
    if (sensor != 0 || !celsius)
        return INVALID_ARGUMENT;
    *celsius = (unsigned)number(device, "temperature");
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTemperatureV(void *handle, unsigned *request)
{
    DEVICE(handle)
    if (request[0] != 0x100000C)
        return ARGUMENT_VERSION_MISMATCH;
    return nvmlDeviceGetTemperature(handle, request[1], &request[2]);
}

EXPORT int nvmlDeviceGetTemperatureThreshold(void *handle, unsigned which, unsigned *celsius)
{
    static const unsigned limits[] = {95, 92, 90, 87};
    DEVICE(handle)
    if (which >= sizeof limits / sizeof *limits)
        return NOT_SUPPORTED;
    *celsius = limits[which];
    return SUCCESS;
}

EXPORT int nvmlDeviceGetFanSpeed(void *handle, unsigned *percent)
{
    DEVICE(handle)
    (void)percent;
    return NOT_SUPPORTED;
}

/* graphics 0, SM 1, memory 2, video 3 */
EXPORT int nvmlDeviceGetClockInfo(void *handle, unsigned which, unsigned *mhz)
{
    DEVICE(handle)
    if (which > 3)
        return INVALID_ARGUMENT;
    *mhz = (unsigned)number(device, which == 2 ? "clock_mem" : "clock_gr");
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMaxClockInfo(void *handle, unsigned which, unsigned *mhz)
{
    DEVICE(handle)
    if (which > 3)
        return INVALID_ARGUMENT;
    *mhz = (unsigned)number(device, which == 2 ? "clock_mem_max" : "clock_gr_max");
    return SUCCESS;
}

EXPORT int nvmlDeviceGetApplicationsClock(void *handle, unsigned which, unsigned *mhz)
{
    return nvmlDeviceGetMaxClockInfo(handle, which, mhz);
}

EXPORT int nvmlDeviceGetDefaultApplicationsClock(void *handle, unsigned which, unsigned *mhz)
{
    return nvmlDeviceGetMaxClockInfo(handle, which, mhz);
}

EXPORT int nvmlDeviceGetMaxCustomerBoostClock(void *handle, unsigned which, unsigned *mhz)
{
    return nvmlDeviceGetMaxClockInfo(handle, which, mhz);
}

EXPORT int nvmlDeviceGetClock(void *handle, unsigned which, unsigned kind, unsigned *mhz)
{
    return kind == 0 ? nvmlDeviceGetClockInfo(handle, which, mhz) : nvmlDeviceGetMaxClockInfo(handle, which, mhz);
}

EXPORT int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons)
{
    DEVICE(handle)
    *reasons = number(device, "processes_all") ? 0 : 1; /* idle */
    return SUCCESS;
}

EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons)
{
    return nvmlDeviceGetCurrentClocksEventReasons(handle, reasons);
}

EXPORT int nvmlDeviceGetEccMode(void *handle, unsigned *current, unsigned *pending)
{
    DEVICE(handle)
    *current = *pending = (unsigned)number(device, "ecc");
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTotalEccErrors(void *handle, unsigned kind, unsigned counter, unsigned long long *count)
{
    DEVICE(handle)
    (void)kind, (void)counter;
    if (!number(device, "ecc"))
        return NOT_SUPPORTED;
    *count = 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMemoryErrorCounter(void *handle, unsigned kind, unsigned counter, unsigned where, unsigned long long *count)
{
    (void)where;
    return nvmlDeviceGetTotalEccErrors(handle, kind, counter, count);
}

EXPORT int nvmlDeviceGetRemappedRows(void *handle, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failure)
{
    DEVICE(handle)
    *corrected = *uncorrected = *pending = *failure = 0;
    return SUCCESS;
}

struct pci {
    char legacy[16];
    unsigned domain, bus, slot, device_id, subsystem_id;
    char address[32];
};

EXPORT int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *pci)
{
    char value[32];
    DEVICE(handle)
    if (!pci)
        return INVALID_ARGUMENT;
    memset(pci, 0, sizeof *pci);
    (void)sscanf(device->bus, "%x:%x:%x", &pci->domain, &pci->bus, &pci->slot);
    snprintf(pci->address, sizeof pci->address, "%s", device->bus);
    snprintf(pci->legacy, sizeof pci->legacy, "%s", device->bus + 4);
    text(device, "device_id", value, sizeof value);
    pci->device_id = (unsigned)strtoul(value, NULL, 16);
    text(device, "subsystem_id", value, sizeof value);
    pci->subsystem_id = (unsigned)strtoul(value, NULL, 16);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetPciInfo_v2(void *handle, struct pci *pci)
{
    return nvmlDeviceGetPciInfo_v3(handle, pci);
}

EXPORT int nvmlDeviceGetPciInfo(void *handle, struct pci *pci)
{
    return nvmlDeviceGetPciInfo_v3(handle, pci);
}

EXPORT int nvmlDeviceGetPcieThroughput(void *handle, unsigned counter, unsigned *kilobytes)
{
    DEVICE(handle)
    *kilobytes = counter ? 409 : 788;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetPcieSpeed(void *handle, unsigned *megabits)
{
    static const unsigned speeds[] = {0, 2500, 5000, 8000, 16000, 32000, 64000};
    DEVICE(handle)
    *megabits = speeds[number(device, "link_generation") % 7];
    return SUCCESS;
}

/* ---- topology ---- */

/* The words of the driver's matrix to NVML's levels. */
static int level_of(const char *word)
{
    static const struct {
        const char *word;
        int level;
    } levels[] = {{"X", 0}, {"PIX", 10}, {"PXB", 20}, {"PHB", 30}, {"NODE", 40}, {"SYS", 50}};
    for (size_t i = 0; i < sizeof levels / sizeof *levels; i++)
        if (!strcmp(levels[i].word, word))
            return levels[i].level;
    return 50;
}

static int level_between(const struct device *one, const struct device *other)
{
    char matrix[512], *rest = matrix, *word = NULL;
    text(one, "topology", matrix, sizeof matrix);
    for (int i = 0; i <= other->row; i++)
        word = strsep(&rest, ",");
    return level_of(word ? word : "SYS");
}

EXPORT int nvmlDeviceGetTopologyCommonAncestor(void *handle, void *second, int *level)
{
    DEVICE(handle)
    struct device *other = device_of(second);
    if (!other || !level)
        return INVALID_ARGUMENT;
    *level = level_between(device, other);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetTopologyNearestGpus(void *handle, int level, unsigned *count, void **nearest)
{
    unsigned have = 0, room = *count;
    DEVICE(handle)
    for (int i = 0; i < ndevices; i++) {
        if (&devices[i] == device || level_between(device, &devices[i]) != level)
            continue;
        if (nearest && have < room)
            nearest[have] = &devices[i];
        have++;
    }
    *count = nearest && have > room ? room : have;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetP2PStatus(void *handle, void *second, unsigned what, unsigned *status)
{
    DEVICE(handle)
    if (!device_of(second))
        return INVALID_ARGUMENT;
    *status = what == 2 ? 5 : 0; /* no NVLink: not supported; reads and writes over PCIe: fine */
    return SUCCESS;
}

static void set_bits(const char *list, unsigned long *mask, unsigned words)
{
    memset(mask, 0, words * sizeof *mask);
    for (const char *at = list; *at;) {
        char *end;
        unsigned long low = strtoul(at, &end, 10), high = low;
        if (end == at)
            return;
        if (*end == '-')
            high = strtoul(end + 1, &end, 10);
        for (; low <= high && low / (8 * sizeof *mask) < words; low++)
            mask[low / (8 * sizeof *mask)] |= 1UL << low % (8 * sizeof *mask);
        at = *end == ',' ? end + 1 : end;
    }
}

EXPORT int nvmlDeviceGetCpuAffinity(void *handle, unsigned words, unsigned long *mask)
{
    char cpus[256];
    DEVICE(handle)
    text(device, "cpus", cpus, sizeof cpus);
    set_bits(cpus, mask, words);
    return SUCCESS;
}

EXPORT int nvmlDeviceGetCpuAffinityWithinScope(void *handle, unsigned words, unsigned long *mask, unsigned scope)
{
    (void)scope;
    return nvmlDeviceGetCpuAffinity(handle, words, mask);
}

EXPORT int nvmlDeviceGetMemoryAffinity(void *handle, unsigned words, unsigned long *mask, unsigned scope)
{
    char node[16];
    DEVICE(handle)
    (void)scope;
    snprintf(node, sizeof node, "%lld", number(device, "numa") < 0 ? 0 : number(device, "numa"));
    set_bits(node, mask, words);
    return SUCCESS;
}

/* The NUMA node that a GPU's own memory is: these have none. The node a GPU is near to is in sysfs. */
EXPORT int nvmlDeviceGetNumaNodeId(void *handle, unsigned *node)
{
    DEVICE(handle)
    (void)node;
    return NOT_SUPPORTED;
}

/* ---- MIG, fabric, NVLink: what these GPUs do not have ---- */

EXPORT int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending)
{
    DEVICE(handle)
    *current = *pending = 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceIsMigDeviceHandle(void *handle, unsigned *is)
{
    DEVICE(handle)
    *is = 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *count)
{
    DEVICE(handle)
    *count = 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **mig)
{
    DEVICE(handle)
    (void)index, (void)mig;
    return NOT_FOUND;
}

struct fabric {
    unsigned char cluster[16];
    unsigned status, clique;
    unsigned char state;
};

EXPORT int nvmlDeviceGetGpuFabricInfo(void *handle, struct fabric *fabric)
{
    DEVICE(handle)
    memset(fabric, 0, sizeof *fabric);
    fabric->state = (unsigned char)nv_number(state(), "fabric", 0);
    return SUCCESS;
}

struct fabric_v {
    unsigned version;
    struct fabric fabric;
    unsigned health;
    unsigned char summary;
};

EXPORT int nvmlDeviceGetGpuFabricInfoV(void *handle, struct fabric_v *info)
{
    DEVICE(handle)
    unsigned version = info->version >> 24;
    if (version != 2 && version != 3)
        return ARGUMENT_VERSION_MISMATCH;
    info->health = 0;
    if (version == 3)
        info->summary = 0;
    return nvmlDeviceGetGpuFabricInfo(handle, &info->fabric);
}

EXPORT int nvmlDeviceGetNvLinkState(void *handle, unsigned link, unsigned *active)
{
    DEVICE(handle)
    (void)link, (void)active;
    return NOT_SUPPORTED;
}

EXPORT int nvmlDeviceGetGspFirmwareVersion(void *handle, char *version)
{
    DEVICE(handle)
    return nvmlSystemGetDriverVersion(version, 64);
}

EXPORT int nvmlDeviceGetGspFirmwareMode(void *handle, unsigned *enabled, unsigned *usual)
{
    DEVICE(handle)
    *enabled = *usual = 1;
    return SUCCESS;
}

/* ---- who uses it ---- */

struct process {
    unsigned pid;
    unsigned long long bytes;
    unsigned gpu_instance, compute_instance;
};

static int processes(void *handle, unsigned *count, struct process *into)
{
    DEVICE(handle)
    unsigned have = (unsigned)number(device, "processes"), room = *count;
    *count = have;
    if (have == 0)
        return SUCCESS;
    if (!into || room < have)
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < have; i++) {
        char key[32], value[64];
        snprintf(key, sizeof key, "process.%u", i);
        text(device, key, value, sizeof value);
        into[i] = (struct process){.gpu_instance = ~0u, .compute_instance = ~0u};
        (void)sscanf(value, "%u %llu", &into[i].pid, &into[i].bytes);
    }
    return SUCCESS;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *into)
{
    return processes(handle, count, into);
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, struct process *into)
{
    return processes(handle, count, into);
}

static int no_processes(void *handle, unsigned *count)
{
    DEVICE(handle)
    *count = 0;
    return SUCCESS;
}

EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, struct process *into)
{
    (void)into;
    return no_processes(handle, count);
}

EXPORT int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *into)
{
    (void)into;
    return no_processes(handle, count);
}

/* ---- changing ---- */

static int change(const struct device *device, const char *key, const char *value)
{
    int code = nv_code(nv_call(control, "set %d %s %s", device->minor, key, value), UNKNOWN);
    forget();
    return code;
}

static int change_number(void *handle, const char *key, unsigned value)
{
    char written[32];
    DEVICE(handle)
    snprintf(written, sizeof written, "%u", value);
    return change(device, key, written);
}

EXPORT int nvmlDeviceSetPowerManagementLimit(void *handle, unsigned milliwatts)
{
    return change_number(handle, "power_limit_mw", milliwatts);
}

EXPORT int nvmlDeviceSetPowerManagementLimit_v2(void *handle, unsigned *request)
{
    DEVICE(handle)
    if (request[0] != 0x0200000C)
        return ARGUMENT_VERSION_MISMATCH;
    return request[1] == 0 ? change_number(handle, "power_limit_mw", request[2]) : NOT_SUPPORTED;
}

EXPORT int nvmlDeviceSetPersistenceMode(void *handle, unsigned mode)
{
    return change_number(handle, "persistence", mode);
}

EXPORT int nvmlDeviceSetComputeMode(void *handle, unsigned mode)
{
    return change_number(handle, "compute_mode", mode);
}

EXPORT int nvmlDeviceSetGpuLockedClocks(void *handle, unsigned low, unsigned high)
{
    char written[64];
    DEVICE(handle)
    snprintf(written, sizeof written, "%u,%u", low, high);
    return change(device, "locked_mhz", written);
}

EXPORT int nvmlDeviceResetGpuLockedClocks(void *handle)
{
    return change_number(handle, "locked_mhz", 0);
}
