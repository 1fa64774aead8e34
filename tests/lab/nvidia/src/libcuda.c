/* libcuda.so.1 of the double: what decides whether CUDA starts, answered from the device nodes as a real one does.
 * The order of what it opens, and the code for each thing that is missing, are those of tests/ground_truth/nvidia. */
#include "client.h"

#include <ctype.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>

#define EXPORT __attribute__((visibility("default")))
#define MAX_GPUS 64
#define RESERVED (12ULL << 30) /* of address space; a limit below it is CUDA_ERROR_OUT_OF_MEMORY */

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, OPERATING_SYSTEM = 304, SYSTEM_DRIVER_MISMATCH = 803, UNKNOWN = 999,
};

struct gpu {
    int minor, fds[4], retained;
    char uuid[64], address[32], name[96];
    unsigned long long memory;
    int major_cc, minor_cc;
};

static struct gpu gpus[MAX_GPUS];
static int ngpus, ready, fds[64], nfds;
static char *own_state;

static int keep(int fd)
{
    if (fd >= 0 && nfds < (int)(sizeof fds / sizeof *fds))
        fds[nfds++] = fd;
    return fd;
}

static void give_up(void)
{
    for (int i = 0; i < nfds; i++)
        close(fds[i]);
    for (int i = 0; i < ngpus; i++)
        for (int k = 0; k < 4; k++)
            if (gpus[i].fds[k] >= 0)
                close(gpus[i].fds[k]);
    nfds = ngpus = 0;
}

static int failed(int code)
{
    give_up();
    return code;
}

/* Pipes and an event a client of the driver has once in a process, shared with NVML's. */
static int client_fds(void)
{
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOLOAD | RTLD_LAZY);
    if (nvml) {
        dlclose(nvml);
        return 1;
    }
    int pair[2];
    for (int i = 0; i < 2; i++) {
        if (pipe2(pair, O_CLOEXEC))
            return 0;
        keep(pair[0]);
        keep(pair[1]);
    }
    return keep(eventfd(0, EFD_CLOEXEC)) >= 0;
}

static int gpu_fd(struct gpu *gpu, int n)
{
    gpu->fds[n] = nv_open_gpu(gpu->minor);
    return gpu->fds[n] >= 0;
}

static void remove_gpu(int i)
{
    for (int k = 0; k < 4; k++)
        if (gpus[i].fds[k] >= 0)
            close(gpus[i].fds[k]);
    memmove(gpus + i, gpus + i + 1, (size_t)(--ngpus - i) * sizeof *gpus);
}

static int open_gpus(const char *state)
{
    int present = (int)nv_number(state, "gpus", 0);
    for (int i = 0; i < present && ngpus < MAX_GPUS; i++) {
        struct gpu *gpu = &gpus[ngpus];
        char key[64], text[32];
        *gpu = (struct gpu){.fds = {-1, -1, -1, -1}};
#define KEY(what) (snprintf(key, sizeof key, "gpu.%d." what, i), key)
        gpu->minor = (int)nv_number(state, KEY("minor"), 0);
        nv_find(state, KEY("uuid"), gpu->uuid, sizeof gpu->uuid);
        nv_find(state, KEY("address"), gpu->address, sizeof gpu->address);
        nv_find(state, KEY("name"), gpu->name, sizeof gpu->name);
        gpu->memory = ((unsigned long long)nv_number(state, KEY("memory_mib"), 0) << 20) -
                      (unsigned long long)nv_number(state, KEY("reserved_bytes"), 0);
        nv_find(state, KEY("compute"), text, sizeof text);
        (void)sscanf(text, "%d.%d", &gpu->major_cc, &gpu->minor_cc);
        nv_prepare(gpu->minor);
        if (gpu_fd(gpu, 0))
            ngpus++;
    }
    /* The first GPU is set up whole, then the others begun, then those finished: which of it runs out of
     * descriptors decides the code. */
    for (int i = 0; i < ngpus; i++)
        for (int k = 1; k < (i ? 2 : 4); k++)
            if (!gpu_fd(&gpus[i], k))
                return NO_DEVICE;
    if (ngpus == 0)
        return NO_DEVICE;
    if (keep(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)) < 0)
        return OPERATING_SYSTEM;
    for (int i = ngpus - 1; i > 0; i--)
        if (!gpu_fd(&gpus[i], 2) || !gpu_fd(&gpus[i], 3))
            remove_gpu(i);
    return SUCCESS;
}

static int by_word(const char *word, size_t length)
{
    if (length > 4 && !strncmp(word, "GPU-", 4)) {
        for (int i = 0; i < ngpus; i++)
            if (!strncmp(gpus[i].uuid, word, length))
                return i;
        return -1;
    }
    return -1;
}

/* CUDA_VISIBLE_DEVICES: numbers or UUIDs, the kind of the first deciding; the first wrong one ends the list; a
 * repeated one is an error. */
/* Measured: an order it does not know is an error of its own. */
static int check_order(void)
{
    const char *order = getenv("CUDA_DEVICE_ORDER");
    return !order || !strcmp(order, "FASTEST_FIRST") || !strcmp(order, "PCI_BUS_ID") ? SUCCESS : INVALID_DEVICE;
}

static int choose_visible(void)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    if (!list)
        return SUCCESS;
    struct gpu chosen[MAX_GPUS];
    int count = 0, uuids = !strncmp(list, "GPU-", 4);
    for (const char *word = list; *word;) {
        size_t length = strcspn(word, ",");
        int found = -1;
        if (uuids)
            found = by_word(word, length);
        else {
            char *end;
            long long number = strtoll(word, &end, 10);
            int index = (int)(unsigned)number; /* the library keeps 32 bits */
            if (end != word && index >= 0 && index < ngpus)
                found = index;
        }
        if (found < 0)
            break;
        for (int i = 0; i < count; i++)
            if (chosen[i].minor == gpus[found].minor)
                return INVALID_DEVICE;
        chosen[count++] = gpus[found];
        word += length + (word[length] == ',');
    }
    for (int i = 0; i < ngpus; i++) {
        int wanted = 0;
        for (int k = 0; k < count; k++)
            wanted |= chosen[k].minor == gpus[i].minor;
        for (int k = 0; k < 4 && !wanted; k++)
            close(gpus[i].fds[k]);
    }
    memcpy(gpus, chosen, (size_t)count * sizeof *gpus);
    ngpus = count;
    return count ? SUCCESS : NO_DEVICE;
}

EXPORT int cuInit(unsigned flags)
{
    char version[64], driver[64];
    int fd;
    if (flags)
        return INVALID_VALUE;
    if (ready)
        return SUCCESS;
    void *space = mmap(NULL, RESERVED, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (space == MAP_FAILED)
        return OUT_OF_MEMORY;
    munmap(space, RESERVED);
    if (!client_fds())
        return failed(OPERATING_SYSTEM);
    nv_prepare(255);
    fd = keep(nv_open("/dev/nvidiactl"));
    if (fd < 0)
        return failed(fd == -EMFILE ? OPERATING_SYSTEM : NO_DEVICE);
    char *state = nv_call(fd, "state");
    if (!state)
        return failed(NO_DEVICE);
    nv_own_version(version, sizeof version);
    nv_find(state, "version", driver, sizeof driver);
    if (strcmp(version, driver)) {
        free(nv_call(fd, "mismatch %s", version));
        free(state);
        return failed(SYSTEM_DRIVER_MISMATCH);
    }
    nv_prepare(-1);
    int code = SUCCESS;
    if (keep(nv_open("/dev/nvidia-uvm")) < 0 || keep(nv_open("/dev/nvidia-uvm")) < 0)
        code = UNKNOWN;
    if (!code)
        code = (int)nv_number(state, "cuinit", SUCCESS);
    if (!code)
        code = open_gpus(state);
    if (!code)
        code = check_order();
    if (!code)
        code = choose_visible();
    if (code) {
        free(state);
        return failed(code);
    }
    own_state = state;
    ready = 1;
    return SUCCESS;
}

EXPORT int cuDriverGetVersion(int *version)
{
    char own[64];
    if (!version)
        return INVALID_VALUE;
    nv_own_version(own, sizeof own);
    *version = nv_cuda_version(own);
    return SUCCESS;
}

EXPORT int cuDeviceGetCount(int *count)
{
    if (!ready)
        return NOT_INITIALIZED;
    *count = ngpus;
    return SUCCESS;
}

#define CHECK_DEVICE(device)          \
    if (!ready)                       \
        return NOT_INITIALIZED;       \
    if ((device) < 0 || (device) >= ngpus) \
        return INVALID_DEVICE

EXPORT int cuDeviceGet(int *device, int ordinal)
{
    CHECK_DEVICE(ordinal);
    *device = ordinal;
    return SUCCESS;
}

EXPORT int cuDeviceGetName(char *name, int room, int device)
{
    CHECK_DEVICE(device);
    snprintf(name, (size_t)room, "%s", gpus[device].name);
    return SUCCESS;
}

EXPORT int cuDeviceGetPCIBusId(char *id, int room, int device)
{
    CHECK_DEVICE(device);
    snprintf(id, (size_t)room, "%s", gpus[device].address);
    for (; *id; id++)
        *id = (char)toupper((unsigned char)*id);
    return SUCCESS;
}

static int uuid_of(unsigned char *uuid, int device)
{
    const char *text = gpus[device].uuid + 4;
    for (int i = 0; i < 16; text++) {
        unsigned value;
        if (*text == '-')
            continue;
        if (sscanf(text++, "%2x", &value) != 1)
            return UNKNOWN;
        uuid[i++] = (unsigned char)value;
    }
    return SUCCESS;
}

EXPORT int cuDeviceGetUuid(unsigned char *uuid, int device)
{
    CHECK_DEVICE(device);
    return uuid_of(uuid, device);
}

EXPORT int cuDeviceGetUuid_v2(unsigned char *uuid, int device)
{
    CHECK_DEVICE(device);
    return uuid_of(uuid, device);
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device)
{
    CHECK_DEVICE(device);
    *bytes = gpus[device].memory;
    return SUCCESS;
}

EXPORT int cuDeviceTotalMem(unsigned *bytes, int device)
{
    CHECK_DEVICE(device);
    *bytes = (unsigned)gpus[device].memory;
    return SUCCESS;
}

EXPORT int cuDeviceComputeCapability(int *major, int *minor, int device)
{
    CHECK_DEVICE(device);
    *major = gpus[device].major_cc;
    *minor = gpus[device].minor_cc;
    return SUCCESS;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    CHECK_DEVICE(device);
    unsigned domain = 0, bus = 0, slot = 0;
    (void)sscanf(gpus[device].address, "%x:%x:%x", &domain, &bus, &slot);
    switch (attribute) {
    case 33: *value = (int)bus; break;
    case 34: *value = (int)slot; break;
    case 50: *value = (int)domain; break;
    case 75: *value = gpus[device].major_cc; break;
    case 76: *value = gpus[device].minor_cc; break;
    default: *value = 0;
    }
    return SUCCESS;
}

/* A context is the address of its GPU. */
static __thread struct gpu *current;

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device)
{
    CHECK_DEVICE(device);
    struct gpu *gpu = &gpus[device];
    int code = gpu->retained ? SUCCESS : nv_code(nv_call(gpu->fds[0], "context"), UNKNOWN);
    if (code)
        return code;
    gpu->retained++;
    *context = gpu;
    return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device)
{
    CHECK_DEVICE(device);
    if (!gpus[device].retained)
        return INVALID_CONTEXT;
    if (--gpus[device].retained == 0)
        return nv_code(nv_call(gpus[device].fds[0], "drop"), UNKNOWN);
    return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRelease(int device)
{
    return cuDevicePrimaryCtxRelease_v2(device);
}

EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    CHECK_DEVICE(device);
    *flags = 0;
    *active = gpus[device].retained > 0;
    return SUCCESS;
}

EXPORT int cuCtxSetCurrent(void *context)
{
    if (!ready)
        return NOT_INITIALIZED;
    current = context;
    return SUCCESS;
}

EXPORT int cuCtxGetCurrent(void **context)
{
    if (!ready)
        return NOT_INITIALIZED;
    *context = current;
    return SUCCESS;
}

EXPORT int cuCtxCreate_v2(void **context, unsigned flags, int device)
{
    (void)flags;
    int code = cuDevicePrimaryCtxRetain(context, device);
    if (!code)
        current = *context;
    return code;
}

EXPORT int cuCtxDestroy_v2(void *context)
{
    struct gpu *gpu = context;
    if (!ready || !gpu)
        return INVALID_CONTEXT;
    if (current == gpu)
        current = NULL;
    return cuDevicePrimaryCtxRelease_v2((int)(gpu - gpus));
}

EXPORT int cuCtxSynchronize(void)
{
    if (!current)
        return INVALID_CONTEXT;
    char *answer = nv_call(current->fds[0], "allocate 0");
    return nv_code(answer, UNKNOWN);
}

/* Memory of the GPU is only counted; its addresses are reserved here and hold no page. The first page says how much. */
EXPORT int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes)
{
    if (!ready)
        return NOT_INITIALIZED;
    if (!current)
        return INVALID_CONTEXT;
    if (!bytes)
        return INVALID_VALUE;
    int code = nv_code(nv_call(current->fds[0], "allocate %zu", bytes), UNKNOWN);
    if (code)
        return code;
    size_t *header = malloc(sizeof *header);
    if (!header)
        return OUT_OF_MEMORY;
    *header = bytes;
    *pointer = (uintptr_t)header;
    return SUCCESS;
}

EXPORT int cuMemFree_v2(unsigned long long pointer)
{
    if (!ready)
        return NOT_INITIALIZED;
    if (!current)
        return INVALID_CONTEXT;
    size_t *header = (size_t *)(uintptr_t)pointer;
    if (!header)
        return SUCCESS;
    int code = nv_code(nv_call(current->fds[0], "allocate -%zu", *header), UNKNOWN);
    free(header);
    return code;
}

EXPORT int cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    if (!ready)
        return NOT_INITIALIZED;
    if (!current)
        return INVALID_CONTEXT;
    char *answer = nv_call(current->fds[0], "memory");
    unsigned long long left = 0, all = 0;
    int got = answer ? sscanf(answer, "ok %llu %llu", &left, &all) : 0;
    free(answer);
    if (got != 2)
        return UNKNOWN;
    *free_bytes = left;
    *total = all;
    return SUCCESS;
}

static const struct {
    int code;
    const char *name, *text;
} errors[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {201, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {205, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {800, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
    {801, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {802, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "forward compatibility was attempted on non supported HW"},
    {805, "CUDA_ERROR_MPS_CONNECTION_FAILED", "MPS client failed to connect to the MPS control daemon or the MPS server"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static int describe(int code, const char **into, int want_name)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == code) {
            *into = want_name ? errors[i].name : errors[i].text;
            return SUCCESS;
        }
    *into = NULL;
    return INVALID_VALUE;
}

EXPORT int cuGetErrorName(int code, const char **name)
{
    return describe(code, name, 1);
}

EXPORT int cuGetErrorString(int code, const char **text)
{
    return describe(code, text, 0);
}
