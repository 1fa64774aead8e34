/* nvidia-smi of the double: what people and programs ask it for, in its formats, over libnvidia-ml.so.1.
 * Texts and exit codes (those of NVML) are those of tests/ground_truth/nvidia/smi.txt. */
#include "client.h"

#include <ctype.h>
#include <strings.h>
#include <time.h>

#define MAX_GPUS 64
enum { NO_PERMISSION = 4, NOT_FOUND = 6, LIBRARY_NOT_FOUND = 12, GPU_IS_LOST = 15 };

static void *library;

/* NVML's functions take pointers and unsigned numbers only: called without a prototype. */
typedef int (*nvml_function)();
static nvml_function nvml(const char *name)
{
    nvml_function found;
    *(void **)&found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "nvidia-smi: %s is missing in libnvidia-ml.so.1\n", name);
        exit(13);
    }
    return found;
}
#define NVML(name, ...) nvml("nvml" #name)(__VA_ARGS__)

static const char *error_text(int code)
{
    const char *(*text)(int);
    *(void **)&text = dlsym(library, "nvmlErrorString");
    return text ? text(code) : "Unknown Error";
}

/* An NVML code as an exit code: 999 is 255. */
static int exit_of(int code)
{
    return code > 254 ? 255 : code;
}

struct gpu {
    unsigned index;
    void *handle;
    char bus[32], uuid[96], name[96];
};

static struct gpu gpus[MAX_GPUS];
static int ngpus, lost_code;
static unsigned total;

static unsigned asked(const char *function, void *handle)
{
    unsigned value = 0;
    char name[96];
    snprintf(name, sizeof name, "nvml%s", function);
    return nvml(name)(handle, &value) ? 0 : value;
}

/* 13.580.159.04, as NVML says it, is 580.159 here */
static const char *in_two_parts(char *version)
{
    char *own = strchr(version, '.') ? strchr(version, '.') + 1 : version;
    char *dot = strchr(own, '.');
    if (dot && (dot = strchr(dot + 1, '.')))
        *dot = 0;
    return own;
}

static int initialise(void)
{
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library)
        library = dlopen("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1", RTLD_NOW);
    if (!library) {
        printf("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA "
               "Display Driver is properly installed and present in your system.\n"
               "Please also try adding directory that contains libnvidia-ml.so to your system PATH.\n");
        return LIBRARY_NOT_FOUND;
    }
    int code = NVML(Init_v2);
    if (code == 9)
        printf("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the "
               "latest NVIDIA driver is installed and running.\n\n");
    else if (code)
        printf("Failed to initialize NVML: %s\n", error_text(code));
    if (code == 18) {
        char version[80] = "";
        NVML(SystemGetNVMLVersion, version, 80u);
        printf("NVML library version: %s\n", in_two_parts(version));
    }
    return code;
}

static int matches(const struct gpu *gpu, const char *word, size_t length)
{
    char number[16];
    snprintf(number, sizeof number, "%u", gpu->index);
    if (strlen(number) == length && !strncmp(number, word, length))
        return 1;
    if (strlen(gpu->uuid) == length && !strncasecmp(gpu->uuid, word, length))
        return 1;
    unsigned a[4], b[4] = {0};
    char copy[64];
    snprintf(copy, sizeof copy, "%.*s", (int)length, word);
    return sscanf(gpu->bus, "%x:%x:%x.%x", &a[0], &a[1], &a[2], &a[3]) == 4 &&
           (sscanf(copy, "%x:%x:%x.%x", &b[0], &b[1], &b[2], &b[3]) == 4 ||
            (b[0] = 0, sscanf(copy, "%x:%x.%x", &b[1], &b[2], &b[3]) == 3)) &&
           !memcmp(a, b, sizeof a);
}

/* The GPUs meant by -i, all without it. A lost one is said and left out. */
static void find_gpus(const char *chosen)
{
    ngpus = 0;
    NVML(DeviceGetCount_v2, &total);
    for (unsigned i = 0; i < total && i < MAX_GPUS; i++) {
        struct gpu *gpu = &gpus[ngpus];
        int code = NVML(DeviceGetHandleByIndex_v2, i, &gpu->handle);
        gpu->index = i;
        if (code) {
            printf("Unable to determine the device handle for GPU%u: %s%s\n", i, error_text(code),
                   code == GPU_IS_LOST ? ". Reboot the system to recover this GPU" : "");
            lost_code = code;
            continue;
        }
        struct { char legacy[16]; unsigned numbers[5]; char address[32]; } pci;
        NVML(DeviceGetPciInfo_v3, gpu->handle, &pci);
        snprintf(gpu->bus, sizeof gpu->bus, "%s", pci.address);
        NVML(DeviceGetUUID, gpu->handle, gpu->uuid, 96u);
        NVML(DeviceGetName, gpu->handle, gpu->name, 96u);
        int wanted = !chosen;
        for (const char *word = chosen; word && *word; word += strcspn(word, ","), word += *word == ',')
            wanted |= matches(gpu, word, strcspn(word, ","));
        ngpus += wanted;
    }
}

static unsigned cuda_version(void)
{
    int version = 0;
    NVML(SystemGetCudaDriverVersion_v2, &version);
    return (unsigned)version;
}

struct memory { unsigned version; unsigned long long total, reserved, free, used; };

static struct memory memory_of(void *handle)
{
    struct memory memory = {.version = sizeof memory | 2u << 24};
    NVML(DeviceGetMemoryInfo_v2, handle, &memory);
    return memory;
}

static unsigned mib(unsigned long long bytes)
{
    return (unsigned)((bytes + (1u << 20) - 1) >> 20);
}

static const char *now(void)
{
    static char text[64];
    time_t t = time(NULL);
    strftime(text, sizeof text, "%a %b %e %H:%M:%S %Y", localtime(&t));
    return text;
}

static const char *mode_name(unsigned mode, int loud)
{
    static const char *const plain[] = {"Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"};
    static const char *const caps[] = {"DEFAULT", "EXCLUSIVE_THREAD", "PROHIBITED", "EXCLUSIVE_PROCESS"};
    return mode > 3 ? "N/A" : loud ? caps[mode] : plain[mode];
}

struct process { unsigned pid; unsigned long long bytes; unsigned instance, compute; };

static unsigned processes_of(void *handle, struct process *into, unsigned room)
{
    unsigned count = room;
    return NVML(DeviceGetComputeRunningProcesses_v3, handle, &count, into) ? 0 : count;
}

/* ---- the summary ---- */

static void summary(void)
{
    char driver[80] = "", cuda[16];
    unsigned version = cuda_version();
    NVML(SystemGetDriverVersion, driver, 80u);
    snprintf(cuda, sizeof cuda, "%u.%u", version / 1000, version % 1000 / 10);
    printf("%s       \n", now());
    printf("+-----------------------------------------------------------------------------------------+\n");
    if (atoi(driver) >= 610)
        printf("| NVIDIA-SMI %-23sKMD Version: %-14sCUDA UMD Version: %-9s|\n", driver, driver, cuda);
    else
        printf("| NVIDIA-SMI %-23sDriver Version: %-15sCUDA Version: %-9s|\n", driver, driver, cuda);
    printf("+-----------------------------------------+------------------------+----------------------+\n"
           "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n"
           "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n"
           "|                                         |                        |               MIG M. |\n"
           "|=========================================+========================+======================|\n");
    for (int i = 0; i < ngpus; i++) {
        void *h = gpus[i].handle;
        char name[32], mode[16];
        struct memory memory = memory_of(h);
        unsigned ecc = 0, pending = 0, rates[2] = {0}, temperature = 0, compute = asked("DeviceGetComputeMode", h);
        if (strlen(gpus[i].name) > 27)
            snprintf(name, sizeof name, "%.24s...", gpus[i].name);
        else
            snprintf(name, sizeof name, "%s", gpus[i].name);
        NVML(DeviceGetEccMode, h, &ecc, &pending);
        NVML(DeviceGetUtilizationRates, h, rates);
        NVML(DeviceGetTemperature, h, 0u, &temperature);
        snprintf(mode, sizeof mode, "%s", compute == 3 ? "E. Process" : mode_name(compute, 0));
        printf("| %3u  %-27s    %-3s |   %-16s Off | %20s |\n", gpus[i].index, name,
               asked("DeviceGetPersistenceMode", h) ? "On" : "Off", gpus[i].bus, ecc ? "0" : "Off");
        printf("| N/A  %3uC    P%-2u          %4uW / %4uW | %7uMiB / %6uMiB | %6u%%   %10s |\n", temperature,
               asked("DeviceGetPerformanceState", h), asked("DeviceGetPowerUsage", h) / 1000,
               asked("DeviceGetEnforcedPowerLimit", h) / 1000, mib(memory.used), mib(memory.total), rates[0], mode);
        printf("|                                         |                        | %20s |\n", "Disabled");
        printf("+-----------------------------------------+------------------------+----------------------+\n");
    }
    printf("\n"
           "+-----------------------------------------------------------------------------------------+\n"
           "| Processes:                                                                              |\n"
           "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |\n"
           "|        ID   ID                                                               Usage      |\n"
           "|=========================================================================================|\n");
    int shown = 0;
    for (int i = 0; i < ngpus; i++) {
        struct process list[256];
        unsigned count = processes_of(gpus[i].handle, list, 256);
        for (unsigned n = 0; n < count; n++, shown++) {
            char name[256] = "", size[32];
            NVML(SystemGetProcessName, list[n].pid, name, 256u);
            if (strlen(name) > 30)
                memmove(name + 3, name + strlen(name) - 27, 28), memcpy(name, "...", 3);
            snprintf(size, sizeof size, "%uMiB", mib(list[n].bytes));
            printf("| %4u   N/A  N/A %15u      C   %-30s %13s |\n", gpus[i].index, list[n].pid, name, size);
        }
    }
    if (!shown)
        printf("|  No running processes found                                                             |\n");
    printf("+-----------------------------------------------------------------------------------------+\n");
}

/* ---- -q ---- */

enum {
    D_MEMORY = 1, D_UTILIZATION = 2, D_ECC = 4, D_TEMPERATURE = 8, D_POWER = 16, D_CLOCK = 32, D_COMPUTE = 64,
    D_PIDS = 128, D_PERFORMANCE = 256, D_ROWS = 512, D_GSP = 1024, D_RETIRED = 2048, D_ALL = 4096,
};

static const struct { const char *name; int bit; } displays[] = {
    {"MEMORY", D_MEMORY}, {"UTILIZATION", D_UTILIZATION}, {"ECC", D_ECC}, {"TEMPERATURE", D_TEMPERATURE},
    {"POWER", D_POWER}, {"CLOCK", D_CLOCK}, {"COMPUTE", D_COMPUTE}, {"PIDS", D_PIDS}, {"PERFORMANCE", D_PERFORMANCE},
    {"ROW_REMAPPER", D_ROWS}, {"GSP_FIRMWARE_VERSION", D_GSP}, {"PAGE_RETIREMENT", D_RETIRED},
};

/* "    Product Name                                       : NVIDIA H200": the colon stands in one column. */
__attribute__((format(printf, 3, 4))) static void field(int depth, const char *name, const char *format, ...)
{
    va_list arguments;
    printf("%*s%-*s: ", depth * 4, "", 55 - depth * 4, name);
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
}

static void head(int depth, const char *name)
{
    printf("%*s%s\n", depth * 4, "", name);
}

static void absent(int depth, const char *names)
{
    char copy[1024], *rest = copy, *name;
    snprintf(copy, sizeof copy, "%s", names);
    while ((name = strsep(&rest, "|")))
        field(depth, name, "N/A");
}

static void query_identity(const struct gpu *gpu)
{
    void *h = gpu->handle;
    struct { char legacy[16]; unsigned domain, bus, slot, device, subsystem; char address[32]; } pci;
    char serial[64] = "", bios[64] = "", part[64] = "", driver[80] = "";
    unsigned architecture = asked("DeviceGetArchitecture", h), brand = asked("DeviceGetBrand", h);
    NVML(DeviceGetPciInfo_v3, h, &pci);
    NVML(DeviceGetSerial, h, serial, 64u);
    NVML(DeviceGetVbiosVersion, h, bios, 64u);
    NVML(DeviceGetBoardPartNumber, h, part, 64u);
    NVML(SystemGetDriverVersion, driver, 80u);
    field(1, "Product Name", "%s", gpu->name);
    field(1, "Product Brand", "%s", brand == 13 ? "NVIDIA RTX" : "NVIDIA");
    field(1, "Product Architecture", "%s", architecture == 10 ? "Blackwell" : architecture == 9 ? "Hopper" : "Ada Lovelace");
    field(1, "Display Mode", "Requested functionality has been deprecated");
    field(1, "Display Attached", "%s", "No");
    field(1, "Display Active", "Disabled");
    field(1, "Persistence Mode", "%s", asked("DeviceGetPersistenceMode", h) ? "Enabled" : "Disabled");
    field(1, "Addressing Mode", "None");
    head(1, "MIG Mode");
    field(2, "Current", "Disabled");
    field(2, "Pending", "Disabled");
    field(1, "Accounting Mode", "Disabled");
    field(1, "Accounting Mode Buffer Size", "4000");
    head(1, "Driver Model");
    absent(2, "Current|Pending");
    field(1, "Serial Number", "%s", serial);
    field(1, "GPU UUID", "%s", gpu->uuid);
    field(1, "GPU PDI", "0x%016llx", 0x71fa013c34f90000ULL + asked("DeviceGetMinorNumber", h));
    field(1, "Minor Number", "%u", asked("DeviceGetMinorNumber", h));
    field(1, "VBIOS Version", "%s", bios);
    field(1, "MultiGPU Board", "No");
    field(1, "Board ID", "0x%x", pci.bus << 8);
    field(1, "Board Part Number", "%s", part);
    field(1, "GPU Part Number", "%04X-895-A1", pci.device >> 16);
    field(1, "FRU Part Number", "N/A");
    head(1, "Platform Info");
    absent(2, "Chassis Serial Number|Slot Number|Tray Index|Host ID|Peer Type");
    field(2, "Module Id", "%u", asked("DeviceGetModuleId", h));
    absent(2, "GPU Fabric GUID");
    head(1, "Inforom Version");
    field(2, "Image Version", "G520.0282.02.02");
    field(2, "OEM Object", "2.1");
    field(2, "ECC Object", "7.16");
    absent(2, "Power Management Object");
    head(1, "Inforom BBX Object Flush");
    absent(2, "Latest Timestamp|Latest Duration");
    head(1, "GPU Operation Mode");
    absent(2, "Current|Pending");
    field(1, "GPU C2C Mode", "Disabled");
    head(1, "GPU Virtualization Mode");
    field(2, "Virtualization Mode", "None");
    absent(2, "Host VGPU Mode|vGPU Heterogeneous Mode");
    field(1, "GPU Recovery Action", "None");
    field(1, "GSP Firmware Version", "%s", driver);
    head(1, "IBMNPU");
    absent(2, "Relaxed Ordering Mode");
    head(1, "PCI");
    field(2, "Bus", "0x%02X", pci.bus);
    field(2, "Device", "0x%02X", pci.slot);
    field(2, "Domain", "0x%04X", pci.domain);
    field(2, "Base Classcode", "0x3");
    field(2, "Sub Classcode", "0x2");
    field(2, "Device Id", "0x%08X", pci.device);
    field(2, "Bus Id", "%s", gpu->bus);
    field(2, "Sub System Id", "0x%08X", pci.subsystem);
    head(2, "GPU Link Info");
    head(3, "PCIe Generation");
    field(4, "Max", "%u", asked("DeviceGetMaxPcieLinkGeneration", h));
    field(4, "Current", "%u", asked("DeviceGetCurrPcieLinkGeneration", h));
    field(4, "Device Current", "%u", asked("DeviceGetCurrPcieLinkGeneration", h));
    field(4, "Device Max", "%u", asked("DeviceGetGpuMaxPcieLinkGeneration", h));
    field(4, "Host Max", "%u", asked("DeviceGetMaxPcieLinkGeneration", h));
    head(3, "Link Width");
    field(4, "Max", "%ux", asked("DeviceGetMaxPcieLinkWidth", h));
    field(4, "Current", "%ux", asked("DeviceGetCurrPcieLinkWidth", h));
    head(2, "Bridge Chip");
    absent(3, "Type|Firmware");
    field(2, "Replays Since Reset", "0");
    field(2, "Replay Number Rollovers", "0");
    field(2, "Tx Throughput", "788 KB/s");
    field(2, "Rx Throughput", "409 KB/s");
    absent(2, "Atomic Caps Outbound|Atomic Caps Inbound");
    field(1, "Fan Speed", "N/A");
}

static void query_performance(void *h)
{
    unsigned long long reasons = 0;
    NVML(DeviceGetCurrentClocksEventReasons, h, &reasons);
    field(1, "Performance State", "P%u", asked("DeviceGetPerformanceState", h));
    head(1, "Clocks Event Reasons");
    field(2, "Idle", "%s", reasons & 1 ? "Active" : "Not Active");
    field(2, "Applications Clocks Setting", "Not Active");
    field(2, "SW Power Cap", "Not Active");
    field(2, "HW Slowdown", "Not Active");
    field(3, "HW Thermal Slowdown", "Not Active");
    field(3, "HW Power Brake Slowdown", "Not Active");
    field(2, "Sync Boost", "Not Active");
    field(2, "SW Thermal Slowdown", "Not Active");
    field(2, "Display Clock Setting", "Not Active");
    head(1, "Clocks Event Reasons Counters");
    field(2, "SW Power Capping", "0 us");
    field(2, "Sync Boost", "0 us");
    field(2, "SW Thermal Slowdown", "0 us");
    field(2, "HW Thermal Slowdown", "0 us");
    field(2, "HW Power Braking", "0 us");
    field(1, "Sparse Operation Mode", "Disabled");
}

static void query_memory(void *h)
{
    struct memory memory = memory_of(h);
    unsigned long long bar[3] = {0};
    NVML(DeviceGetBAR1MemoryInfo, h, bar);
    head(1, "FB Memory Usage");
    field(2, "Total", "%u MiB", mib(memory.total));
    field(2, "Reserved", "%u MiB", mib(memory.reserved));
    field(2, "Used", "%u MiB", mib(memory.used));
    field(2, "Free", "%u MiB", mib(memory.free));
    head(1, "BAR1 Memory Usage");
    field(2, "Total", "%u MiB", mib(bar[0]));
    field(2, "Used", "%u MiB", mib(bar[2]));
    field(2, "Free", "%u MiB", mib(bar[1]));
    head(1, "Conf Compute Protected Memory Usage");
    field(2, "Total", "0 MiB");
    field(2, "Used", "0 MiB");
    field(2, "Free", "0 MiB");
}

static void query_utilization(void *h, int whole)
{
    static const char *const sessions[] = {"Encoder Stats", "FBC Stats"};
    unsigned rates[2] = {0};
    NVML(DeviceGetUtilizationRates, h, rates);
    head(1, "Utilization");
    field(2, "GPU", "%u %%", rates[0]);
    field(2, "Memory", "%u %%", rates[1]);
    field(2, "Encoder", "0 %%");
    field(2, "Decoder", "0 %%");
    field(2, "JPEG", "0 %%");
    field(2, "OFA", "0 %%");
    for (int i = 0; whole && i < 2; i++) {
        head(1, sessions[i]);
        field(2, "Active Sessions", "0");
        field(2, "Average FPS", "0");
        field(2, "Average Latency", "0");
    }
    if (whole) {
        head(1, "DRAM Encryption Mode");
        absent(2, "Current|Pending");
    }
}

static void query_ecc(void *h)
{
    static const char *const volatiles[] = {
        "SRAM Correctable", "SRAM Uncorrectable Parity", "SRAM Uncorrectable SEC-DED", "DRAM Correctable",
        "DRAM Uncorrectable",
    };
    static const char *const sources[] = {"SRAM L2", "SRAM SM", "SRAM Microcontroller", "SRAM PCIE", "SRAM Other"};
    unsigned current = 0, pending = 0;
    NVML(DeviceGetEccMode, h, &current, &pending);
    head(1, "ECC Mode");
    field(2, "Current", "%s", current ? "Enabled" : "Disabled");
    field(2, "Pending", "%s", pending ? "Enabled" : "Disabled");
    head(1, "ECC Errors");
    for (int kind = 0; kind < 2; kind++) {
        head(2, kind ? "Aggregate" : "Volatile");
        for (int i = 0; i < 5; i++)
            field(3, volatiles[i], "%s", current ? "0" : "N/A");
        if (kind)
            field(3, "SRAM Threshold Exceeded", "%s", current ? "No" : "N/A");
    }
    head(2, "Aggregate Uncorrectable SRAM Sources");
    for (int i = 0; i < 5; i++)
        field(3, sources[i], "%s", current ? "0" : "N/A");
    field(2, "Channel Repair Pending", "No");
    field(2, "TPC Repair Pending", "No");
    field(2, "Unrepairable Memory", "No");
}

static void query_temperature(void *h)
{
    unsigned celsius = 0;
    NVML(DeviceGetTemperature, h, 0u, &celsius);
    head(1, "Temperature");
    field(2, "GPU Current Temp", "%u C", celsius);
    field(2, "GPU T.Limit Temp", "%d C", 87 - (int)celsius);
    field(2, "GPU Shutdown T.Limit Temp", "-8 C");
    field(2, "GPU Slowdown T.Limit Temp", "-2 C");
    field(2, "GPU Max Operating T.Limit Temp", "0 C");
    absent(2, "GPU Target Temperature|Memory Current Temp|Memory Max Operating T.Limit Temp");
}

static void query_power(void *h, int whole)
{
    unsigned low = 0, high = 0;
    double draw = asked("DeviceGetPowerUsage", h) / 1000.0;
    NVML(DeviceGetPowerManagementLimitConstraints, h, &low, &high);
    head(1, "GPU Power Readings");
    field(2, "Average Power Draw", "%.2f W", draw);
    field(2, "Instantaneous Power Draw", "%.2f W", draw);
    field(2, "Current Power Limit", "%.2f W", asked("DeviceGetEnforcedPowerLimit", h) / 1000.0);
    field(2, "Requested Power Limit", "%.2f W", asked("DeviceGetPowerManagementLimit", h) / 1000.0);
    field(2, "Default Power Limit", "%.2f W", asked("DeviceGetPowerManagementDefaultLimit", h) / 1000.0);
    field(2, "Min Power Limit", "%.2f W", low / 1000.0);
    field(2, "Max Power Limit", "%.2f W", high / 1000.0);
    if (!whole) {
        head(1, "Power Samples");
        field(2, "Duration", "2.36 sec");
        field(2, "Number of Samples", "119");
        field(2, "Max", "%.2f W", draw);
        field(2, "Min", "%.2f W", draw);
        field(2, "Avg", "%.2f W", draw);
    }
    head(1, "GPU Memory Power Readings ");
    absent(2, "Average Power Draw|Instantaneous Power Draw");
    head(1, "Module Power Readings");
    absent(2, "Average Power Draw|Instantaneous Power Draw|Current Power Limit|Requested Power Limit|"
              "Default Power Limit|Min Power Limit|Max Power Limit");
    if (whole) {
        absent(1, "Power Smoothing");
        head(1, "Workload Power Profiles");
        absent(2, "Requested Profiles|Enforced Profiles");
    }
}

static unsigned clock_of(void *h, const char *which, unsigned domain)
{
    unsigned mhz = 0;
    nvml(which)(h, domain, &mhz);
    return mhz;
}

static void some_clocks(void *h, const char *title, const char *function, int all)
{
    static const char *const names[] = {"Graphics", "SM", "Memory", "Video"};
    head(1, title);
    for (unsigned i = 0; i < 4; i++)
        if (all || i == 0 || i == 2)
            field(2, names[i], "%u MHz", clock_of(h, function, i));
}

static void query_clocks(void *h, int whole)
{
    static const char *const samples[] = {"SM Clock Samples", "Memory Clock Samples"};
    static const char *const numbers[] = {"Duration", "Number of Samples", "Max", "Min", "Avg"};
    some_clocks(h, "Clocks", "nvmlDeviceGetClockInfo", 1);
    some_clocks(h, "Applications Clocks", "nvmlDeviceGetApplicationsClock", 0);
    some_clocks(h, "Default Applications Clocks", "nvmlDeviceGetDefaultApplicationsClock", 0);
    head(1, "Deferred Clocks");
    absent(2, "Memory");
    some_clocks(h, "Max Clocks", "nvmlDeviceGetMaxClockInfo", 1);
    head(1, "Max Customer Boost Clocks");
    field(2, "Graphics", "%u MHz", clock_of(h, "nvmlDeviceGetMaxCustomerBoostClock", 0));
    for (int i = 0; !whole && i < 2; i++) {
        head(1, samples[i]);
        for (int k = 0; k < 5; k++)
            field(2, numbers[k], "Not Found");
    }
    head(1, "Clock Policy");
    absent(2, "Auto Boost|Auto Boost Default");
}

static void query_fabric(void)
{
    head(1, "Fabric");
    absent(2, "State|Status|CliqueId|ClusterUUID");
    head(2, "Health");
    absent(3, "Summary|Bandwidth|Route Recovery in progress|Route Unhealthy|Access Timeout Recovery|"
              "Incorrect Configuration|Partition Assigned");
}

static void query_rows(void)
{
    static const char *const banks[] = {"Max", "High", "Partial", "Low", "None"};
    head(1, "Remapped Rows");
    field(2, "Correctable Error", "0");
    field(2, "Inactive Correctable Error", "0");
    field(2, "Uncorrectable Error", "0");
    field(2, "Inactive Uncorrectable Error", "0");
    field(2, "Pending", "No");
    field(2, "Remapping Failure Occurred", "No");
    head(2, "Bank Remap Availability Histogram");
    for (int i = 0; i < 5; i++)
        field(3, banks[i], "%d bank(s)", i ? 0 : 3072);
}

static void query_pids(void *h)
{
    struct process list[256];
    unsigned count = processes_of(h, list, 256);
    if (!count) {
        field(1, "Processes", "None");
        return;
    }
    head(1, "Processes");
    for (unsigned i = 0; i < count; i++) {
        char name[256] = "";
        NVML(SystemGetProcessName, list[i].pid, name, 256u);
        printf("        GPU instance ID                   : N/A\n        Compute instance ID               : N/A\n"
               "        Process ID                        : %u\n            Type                          : C\n"
               "            Name                          : %s\n            Used GPU Memory               : %u MiB\n",
               list[i].pid, name, mib(list[i].bytes));
    }
}

static void query(int what)
{
    char driver[80] = "";
    unsigned version = cuda_version();
    NVML(SystemGetDriverVersion, driver, 80u);
    printf("\n==============NVSMI LOG==============\n\n");
    field(0, "Timestamp", "%s", now());
    field(0, "Driver Version", "%s", driver);
    field(0, "CUDA Version", "%u.%u", version / 1000, version % 1000 / 10);
    putchar('\n');
    field(0, "Attached GPUs", "%u", total);
    for (int i = 0; i < ngpus; i++) {
        void *h = gpus[i].handle;
        printf("GPU %s\n", gpus[i].bus);
        if (what & D_ALL)
            query_identity(&gpus[i]);
        if (what & (D_ALL | D_PERFORMANCE))
            query_performance(h);
        if (what & (D_ALL | D_MEMORY))
            query_memory(h);
        if (what & (D_ALL | D_COMPUTE))
            field(1, "Compute Mode", "%s", mode_name(asked("DeviceGetComputeMode", h), 0));
        if (what & (D_ALL | D_UTILIZATION))
            query_utilization(h, what & D_ALL);
        if (what & (D_ALL | D_ECC))
            query_ecc(h);
        if (what & (D_ALL | D_RETIRED)) {
            head(1, "Retired Pages");
            absent(2, "Single Bit ECC|Double Bit ECC|Pending Page Blacklist");
        }
        if (what & (D_ALL | D_ROWS)) {
            query_rows();
        }
        if (what & (D_ALL | D_TEMPERATURE))
            query_temperature(h);
        if (what & (D_ALL | D_POWER))
            query_power(h, what & D_ALL);
        if (what & (D_ALL | D_CLOCK))
            query_clocks(h, what & D_ALL);
        if (what & D_GSP)
            field(1, "GSP Firmware Version", "%s", driver);
        if (what & D_ALL)
            query_fabric();
        if (what & (D_ALL | D_PIDS))
            query_pids(h);
        if (what & D_ALL) {
            head(1, "Capabilities");
            field(2, "EGM", "disabled");
        }
    }
    putchar('\n');
}

static int parse_displays(const char *list)
{
    int what = 0;
    for (const char *word = list; *word; word += strcspn(word, ","), word += *word == ',') {
        size_t length = strcspn(word, ","), found = 0;
        for (size_t i = 0; i < sizeof displays / sizeof *displays; i++)
            if (strlen(displays[i].name) == length && !strncasecmp(displays[i].name, word, length)) {
                what |= displays[i].bit;
                found = 1;
            }
        if (!found)
            return 0;
    }
    return what;
}

/* ---- --query-gpu ---- */

struct style { int header, units; };

/* name as asked, name as printed, unit, kind and source */
static const struct property { const char *name, *title, *unit; char kind; const char *source; } properties[] = {
    {"timestamp", 0, 0, 't', 0}, {"driver_version", 0, 0, 'd', 0}, {"count", 0, 0, 'n', 0},
    {"name", 0, 0, 's', "Name"}, {"gpu_name", "name", 0, 's', "Name"},
    {"serial", 0, 0, 's', "Serial"}, {"gpu_serial", "serial", 0, 's', "Serial"},
    {"uuid", 0, 0, 's', "UUID"}, {"gpu_uuid", "uuid", 0, 's', "UUID"},
    {"pci.bus_id", 0, 0, 'b', "bus"}, {"gpu_bus_id", "pci.bus_id", 0, 'b', "bus"},
    {"pci.domain", 0, 0, 'b', "domain"}, {"pci.bus", 0, 0, 'b', "number"}, {"pci.device", 0, 0, 'b', "slot"},
    {"pci.device_id", 0, 0, 'b', "device"}, {"pci.sub_device_id", 0, 0, 'b', "subsystem"},
    {"pcie.link.gen.current", 0, 0, 'u', "CurrPcieLinkGeneration"},
    {"pcie.link.gen.gpucurrent", 0, 0, 'u', "CurrPcieLinkGeneration"},
    {"pcie.link.gen.max", 0, 0, 'u', "MaxPcieLinkGeneration"},
    {"pcie.link.gen.gpumax", 0, 0, 'u', "GpuMaxPcieLinkGeneration"},
    {"pcie.link.gen.hostmax", 0, 0, 'u', "MaxPcieLinkGeneration"},
    {"pcie.link.width.current", 0, 0, 'u', "CurrPcieLinkWidth"},
    {"pcie.link.width.max", 0, 0, 'u', "MaxPcieLinkWidth"}, {"index", 0, 0, 'u', "Index"},
    {"display_mode", 0, 0, '=', "[Requested functionality has been deprecated]"},
    {"display_attached", 0, 0, '=', "No"}, {"display_active", 0, 0, '=', "Disabled"},
    {"persistence_mode", 0, 0, 'e', "PersistenceMode"}, {"addressing_mode", 0, 0, '=', "None"},
    {"accounting.mode", 0, 0, '=', "Disabled"}, {"accounting.buffer_size", 0, 0, '=', "4000"},
    {"vbios_version", 0, 0, 's', "VbiosVersion"}, {"gpu_recovery_action", 0, 0, '=', "None"},
    {"fan.speed", 0, "%", '-', 0}, {"pstate", 0, 0, 'p', "PerformanceState"},
    {"clocks_event_reasons.active", 0, 0, 'r', 0}, {"clocks_throttle_reasons.active", "clocks_event_reasons.active", 0, 'r', 0},
    {"memory.total", 0, "MiB", 'm', "total"}, {"memory.reserved", 0, "MiB", 'm', "reserved"},
    {"memory.used", 0, "MiB", 'm', "used"}, {"memory.free", 0, "MiB", 'm', "free"},
    {"compute_mode", 0, 0, 'c', 0}, {"compute_cap", 0, 0, 'v', 0},
    {"utilization.gpu", 0, "%", 'y', "0"}, {"utilization.memory", 0, "%", 'y', "1"},
    {"encoder.stats.sessionCount", 0, 0, '=', "0"},
    {"ecc.mode.current", 0, 0, 'x', 0}, {"ecc.mode.pending", 0, 0, 'x', 0},
    {"ecc.errors.corrected.volatile.total", 0, 0, 'z', 0}, {"ecc.errors.uncorrected.volatile.total", 0, 0, 'z', 0},
    {"ecc.errors.corrected.aggregate.total", 0, 0, 'z', 0}, {"ecc.errors.uncorrected.aggregate.total", 0, 0, 'z', 0},
    {"remapped_rows.correctable", 0, 0, '=', "0"}, {"remapped_rows.uncorrectable", 0, 0, '=', "0"},
    {"remapped_rows.pending", 0, 0, '=', "No"}, {"remapped_rows.failure", 0, 0, '=', "No"},
    {"retired_pages.pending", 0, 0, '-', 0}, {"retired_pages.sbe", "retired_pages.single_bit_ecc.count", 0, '-', 0},
    {"retired_pages.dbe", "retired_pages.double_bit.count", 0, '-', 0},
    {"temperature.gpu", 0, 0, 'k', 0}, {"temperature.memory", 0, 0, '/', 0},
    {"power.management", 0, 0, '=', "Enabled"},
    {"power.draw", 0, "W", 'w', "PowerUsage"}, {"power.draw.average", 0, "W", 'w', "PowerUsage"},
    {"power.draw.instant", 0, "W", 'w', "PowerUsage"}, {"power.limit", 0, "W", 'w', "PowerManagementLimit"},
    {"enforced.power.limit", 0, "W", 'w', "EnforcedPowerLimit"},
    {"power.default_limit", 0, "W", 'w', "PowerManagementDefaultLimit"},
    {"power.min_limit", 0, "W", 'l', "0"}, {"power.max_limit", 0, "W", 'l', "1"},
    {"clocks.current.graphics", 0, "MHz", 'g', "nvmlDeviceGetClockInfo 0"},
    {"clocks.gr", "clocks.current.graphics", "MHz", 'g', "nvmlDeviceGetClockInfo 0"},
    {"clocks.current.sm", 0, "MHz", 'g', "nvmlDeviceGetClockInfo 1"},
    {"clocks.sm", "clocks.current.sm", "MHz", 'g', "nvmlDeviceGetClockInfo 1"},
    {"clocks.current.memory", 0, "MHz", 'g', "nvmlDeviceGetClockInfo 2"},
    {"clocks.mem", "clocks.current.memory", "MHz", 'g', "nvmlDeviceGetClockInfo 2"},
    {"clocks.current.video", 0, "MHz", 'g', "nvmlDeviceGetClockInfo 3"},
    {"clocks.video", "clocks.current.video", "MHz", 'g', "nvmlDeviceGetClockInfo 3"},
    {"clocks.max.graphics", 0, "MHz", 'g', "nvmlDeviceGetMaxClockInfo 0"},
    {"clocks.max.gr", "clocks.max.graphics", "MHz", 'g', "nvmlDeviceGetMaxClockInfo 0"},
    {"clocks.max.sm", 0, "MHz", 'g', "nvmlDeviceGetMaxClockInfo 1"},
    {"clocks.max.memory", 0, "MHz", 'g', "nvmlDeviceGetMaxClockInfo 2"},
    {"clocks.max.mem", "clocks.max.memory", "MHz", 'g', "nvmlDeviceGetMaxClockInfo 2"},
    {"clocks.applications.graphics", 0, "MHz", 'g', "nvmlDeviceGetApplicationsClock 0"},
    {"clocks.applications.memory", 0, "MHz", 'g', "nvmlDeviceGetApplicationsClock 2"},
    {"mig.mode.current", 0, 0, '=', "Disabled"}, {"mig.mode.pending", 0, 0, '=', "Disabled"},
    {"gsp.mode.current", 0, 0, '=', "Enabled"}, {"gsp.mode.default", 0, 0, '=', "Enabled"},
    {"c2c.mode", 0, 0, '=', "Disabled"}, {"fabric.state", 0, 0, '/', 0}, {"fabric.status", 0, 0, '/', 0},
};

static const struct property *property_of(const char *name, size_t length)
{
    for (size_t i = 0; i < sizeof properties / sizeof *properties; i++)
        if (strlen(properties[i].name) == length && !strncasecmp(properties[i].name, name, length))
            return &properties[i];
    return NULL;
}

static void value_of(const struct gpu *gpu, const struct property *p, char *into, size_t room, int *number)
{
    void *h = gpu->handle;
    char function[96];
    unsigned a = 0, b = 0;
    snprintf(function, sizeof function, "nvmlDeviceGet%s", p->source ? p->source : "");
    *number = 1;
    switch (p->kind) {
    case 't': {
        time_t t = time(NULL);
        strftime(into, room, "%Y/%m/%d %H:%M:%S.000", localtime(&t));
        break;
    }
    case 'd': NVML(SystemGetDriverVersion, into, (unsigned)room); break;
    case 'n': snprintf(into, room, "%u", total); break;
    case 's': nvml(function)(h, into, (unsigned)room); break;
    case 'u': nvml(function)(h, &a); snprintf(into, room, "%u", a); break;
    case 'p': nvml(function)(h, &a); snprintf(into, room, "P%u", a); break;
    case 'e': nvml(function)(h, &a); snprintf(into, room, "%s", a ? "Enabled" : "Disabled"); break;
    case 'w': nvml(function)(h, &a); snprintf(into, room, "%.2f", a / 1000.0); break;
    case 'l':
        NVML(DeviceGetPowerManagementLimitConstraints, h, &a, &b);
        snprintf(into, room, "%.2f", (*p->source == '0' ? a : b) / 1000.0);
        break;
    case 'y': {
        unsigned rates[2] = {0};
        NVML(DeviceGetUtilizationRates, h, rates);
        snprintf(into, room, "%u", rates[*p->source - '0']);
        break;
    }
    case 'k': NVML(DeviceGetTemperature, h, 0u, &a); snprintf(into, room, "%u", a); break;
    case 'c': snprintf(into, room, "%s", mode_name(asked("DeviceGetComputeMode", h), 0)); break;
    case 'v': {
        int major = 0, minor = 0;
        NVML(DeviceGetCudaComputeCapability, h, &major, &minor);
        snprintf(into, room, "%d.%d", major, minor);
        break;
    }
    case 'x': NVML(DeviceGetEccMode, h, &a, &b); snprintf(into, room, "%s", a ? "Enabled" : "Disabled"); break;
    case 'z': NVML(DeviceGetEccMode, h, &a, &b); snprintf(into, room, "%s", a ? "0" : "[N/A]"); break;
    case 'r': {
        unsigned long long reasons = 0;
        NVML(DeviceGetCurrentClocksEventReasons, h, &reasons);
        snprintf(into, room, "0x%016llx", reasons);
        break;
    }
    case 'm': {
        struct memory memory = memory_of(h);
        snprintf(into, room, "%u", mib(*p->source == 't' ? memory.total : *p->source == 'r' ? memory.reserved
                                       : *p->source == 'u' ? memory.used : memory.free));
        break;
    }
    case 'g': {
        char name[64];
        (void)sscanf(p->source, "%63s %u", name, &a);
        snprintf(into, room, "%u", clock_of(h, name, a));
        break;
    }
    case 'b': {
        struct { char legacy[16]; unsigned domain, bus, slot, device, subsystem; char address[32]; } pci;
        NVML(DeviceGetPciInfo_v3, h, &pci);
        if (!strcmp(p->source, "bus"))
            snprintf(into, room, "%s", pci.address);
        else if (!strcmp(p->source, "domain"))
            snprintf(into, room, "0x%04X", pci.domain);
        else if (!strcmp(p->source, "number"))
            snprintf(into, room, "0x%02X", pci.bus);
        else if (!strcmp(p->source, "slot"))
            snprintf(into, room, "0x%02X", pci.slot);
        else
            snprintf(into, room, "0x%08X", *p->source == 'd' ? pci.device : pci.subsystem);
        break;
    }
    case '/': snprintf(into, room, "N/A"); *number = 0; break;
    case '-': snprintf(into, room, "[N/A]"); *number = 0; break;
    default: snprintf(into, room, "%s", p->source);
    }
}

static int query_gpu(const char *list, struct style style)
{
    const struct property *wanted[128];
    int count = 0;
    for (const char *word = list; *word && count < 128; word += strcspn(word, ","), word += *word == ',') {
        while (*word == ' ')
            word++;
        size_t length = strcspn(word, ",");
        wanted[count] = property_of(word, length);
        if (!wanted[count]) {
            printf("Field \"%.*s\" is not a valid field to query.\n\n", (int)length, word);
            return 2;
        }
        count++;
    }
    for (int i = 0; style.header && i < count; i++) {
        const struct property *p = wanted[i];
        printf("%s%s", i ? ", " : "", p->title ? p->title : p->name);
        if (p->unit && style.units)
            printf(" [%s]", p->unit);
    }
    if (style.header)
        putchar('\n');
    for (int g = 0; g < ngpus; g++) {
        for (int i = 0; i < count; i++) {
            char value[128] = "";
            int number;
            value_of(&gpus[g], wanted[i], value, sizeof value, &number);
            printf("%s%s", i ? ", " : "", value);
            if (wanted[i]->unit && style.units && number)
                printf(" %s", wanted[i]->unit);
        }
        putchar('\n');
    }
    return 0;
}

static int query_apps(const char *list, struct style style)
{
    static const struct { const char *name, *title, *unit; } known[] = {
        {"timestamp", 0, 0}, {"gpu_name", 0, 0}, {"gpu_bus_id", 0, 0}, {"gpu_serial", 0, 0}, {"gpu_uuid", 0, 0},
        {"pid", 0, 0}, {"process_name", 0, 0}, {"name", "process_name", 0},
        {"used_gpu_memory", 0, "MiB"}, {"used_memory", "used_gpu_memory", "MiB"},
    };
    int wanted[32], count = 0;
    for (const char *word = list; *word && count < 32; word += strcspn(word, ","), word += *word == ',') {
        while (*word == ' ')
            word++;
        size_t length = strcspn(word, ","), i = 0, all = sizeof known / sizeof *known;
        while (i < all && (strlen(known[i].name) != length || strncasecmp(known[i].name, word, length)))
            i++;
        if (i == all) {
            printf("Field \"%.*s\" is not a valid field to query.\n\n", (int)length, word);
            return 2;
        }
        wanted[count++] = (int)i;
    }
    for (int i = 0; style.header && i < count; i++)
        printf("%s%s%s", i ? ", " : "", known[wanted[i]].title ? known[wanted[i]].title : known[wanted[i]].name,
               known[wanted[i]].unit && style.units ? " [MiB]" : "");
    if (style.header)
        putchar('\n');
    for (int g = 0; g < ngpus; g++) {
        struct process apps[256];
        unsigned n = processes_of(gpus[g].handle, apps, 256);
        for (unsigned k = 0; k < n; k++) {
            char name[256] = "", serial[64] = "";
            NVML(SystemGetProcessName, apps[k].pid, name, 256u);
            NVML(DeviceGetSerial, gpus[g].handle, serial, 64u);
            for (int i = 0; i < count; i++) {
                const char *what = known[wanted[i]].title ? known[wanted[i]].title : known[wanted[i]].name;
                printf("%s", i ? ", " : "");
                if (!strcmp(what, "pid"))
                    printf("%u", apps[k].pid);
                else if (!strcmp(what, "process_name"))
                    printf("%s", name);
                else if (!strcmp(what, "used_gpu_memory"))
                    printf("%u%s", mib(apps[k].bytes), style.units ? " MiB" : "");
                else if (!strcmp(what, "gpu_uuid"))
                    printf("%s", gpus[g].uuid);
                else if (!strcmp(what, "gpu_bus_id"))
                    printf("%s", gpus[g].bus);
                else if (!strcmp(what, "gpu_name"))
                    printf("%s", gpus[g].name);
                else if (!strcmp(what, "gpu_serial"))
                    printf("%s", serial);
                else
                    printf("%s", now());
            }
            putchar('\n');
        }
    }
    return 0;
}

/* ---- topo ---- */

static const char *level_name(int level)
{
    switch (level) {
    case 0: return "X";
    case 10: return "PIX";
    case 20: return "PXB";
    case 30: return "PHB";
    case 40: return "NODE";
    default: return "SYS";
    }
}

static void ranges(const unsigned long *mask, unsigned words, char *into, size_t room)
{
    size_t used = 0;
    unsigned bits = words * 8 * (unsigned)sizeof *mask;
    into[0] = 0;
    for (unsigned i = 0; i < bits; i++) {
        unsigned end = i;
        if (!(mask[i / 64] >> i % 64 & 1))
            continue;
        while (end + 1 < bits && mask[(end + 1) / 64] >> (end + 1) % 64 & 1)
            end++;
        used += (size_t)snprintf(into + used, room - used, end > i ? "%s%u-%u" : "%s%u", used ? "," : "", i, end);
        i = end;
    }
}

static void topology_matrix(void)
{
    printf("\t\033[4m");
    for (int i = 0; i < ngpus; i++)
        printf("GPU%u\t", gpus[i].index);
    printf("CPU Affinity\tNUMA Affinity\tGPU NUMA ID\033[0m\n");
    for (int i = 0; i < ngpus; i++) {
        unsigned long cpus[16] = {0}, nodes[4] = {0};
        char cpu_text[256], node_text[64];
        printf("GPU%u", gpus[i].index);
        for (int k = 0; k < ngpus; k++) {
            int level = 0;
            if (i != k)
                NVML(DeviceGetTopologyCommonAncestor, gpus[i].handle, gpus[k].handle, &level);
            printf(i == k ? "\t %s " : "\t%s", level_name(level));
        }
        NVML(DeviceGetCpuAffinity, gpus[i].handle, 16u, cpus);
        NVML(DeviceGetMemoryAffinity, gpus[i].handle, 4u, nodes, 0u);
        ranges(cpus, 16, cpu_text, sizeof cpu_text);
        ranges(nodes, 4, node_text, sizeof node_text);
        printf("\t%s\t%s\t\tN/A\n", cpu_text, node_text);
    }
    printf("\nLegend:\n\n"
           "  X    = Self\n"
           "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)\n"
           "  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node\n"
           "  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)\n"
           "  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)\n"
           "  PIX  = Connection traversing at most a single PCIe bridge\n"
           "  NV#  = Connection traversing a bonded set of # NVLinks\n");
}

static int topology_p2p(const char *what)
{
    static const char *const words[] = {"OK", "CNS", "GNS", "TNS", "NS", "NS", "U"};
    unsigned kind = *what == 'r' ? 0 : *what == 'w' ? 1 : *what == 'n' ? 2 : *what == 'a' ? 3 : *what == 'p' ? 4 : 9;
    if (kind == 9)
        return 2;
    printf(" \t\033[4m");
    for (int i = 0; i < ngpus; i++)
        printf("GPU%u\t", gpus[i].index);
    printf("\033[0m\n");
    for (int i = 0; i < ngpus; i++) {
        printf(" GPU%u\t", gpus[i].index);
        for (int k = 0; k < ngpus; k++) {
            unsigned status = 0;
            NVML(DeviceGetP2PStatus, gpus[i].handle, gpus[k].handle, kind, &status);
            printf("%s\t", i == k ? "X" : words[status % 7]);
        }
        putchar('\n');
    }
    printf("\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n"
           "  GNS  = GPU not supported\n  TNS  = Topology not supported\n  NS   = Not supported\n  U    = Unknown\n");
    return 0;
}

/* ---- changing ---- */

static int refused(const char *what, const struct gpu *gpu, int code)
{
    printf("Failed to set %s for GPU %s: %s\nTerminating early due to previous errors.\n", what, gpu->bus, error_text(code));
    return exit_of(code);
}

static int on_or_off(const char *word)
{
    if (!strcmp(word, "1") || !strcasecmp(word, "ENABLED"))
        return 1;
    return !strcmp(word, "0") || !strcasecmp(word, "DISABLED") ? 0 : -1;
}

static int set_persistence(const char *word)
{
    int wanted = on_or_off(word);
    if (wanted < 0) {
        printf("Invalid argument: %s\n", word);
        return 2;
    }
    for (int i = 0; i < ngpus; i++) {
        if ((int)asked("DeviceGetPersistenceMode", gpus[i].handle) == wanted) {
            printf("Persistence mode is already %s for GPU %s.\n", wanted ? "Enabled" : "Disabled", gpus[i].bus);
            continue;
        }
        int code = NVML(DeviceSetPersistenceMode, gpus[i].handle, (unsigned)wanted);
        if (code)
            return refused("persistence mode", &gpus[i], code);
        printf("%s persistence mode for GPU %s.\n", wanted ? "Enabled" : "Disabled", gpus[i].bus);
    }
    puts("All done.");
    return 0;
}

static int set_power(const char *word)
{
    char *end;
    double watts = strtod(word, &end);
    if (end == word || *end) {
        printf("Invalid argument: %s\n", word);
        return 2;
    }
    for (int i = 0; i < ngpus; i++) {
        unsigned low = 0, high = 0, before = asked("DeviceGetPowerManagementLimit", gpus[i].handle);
        NVML(DeviceGetPowerManagementLimitConstraints, gpus[i].handle, &low, &high);
        if (watts * 1000 < low || watts * 1000 > high) {
            printf("Provided power limit %.2f W is not a valid power limit which should be between %.2f W and %.2f W for "
                   "GPU %s\nTerminating early due to previous errors.\n", watts, low / 1000.0, high / 1000.0, gpus[i].bus);
            return 2;
        }
        int code = NVML(DeviceSetPowerManagementLimit, gpus[i].handle, (unsigned)(watts * 1000));
        if (code)
            return refused("power management limit", &gpus[i], code);
        if (!asked("DeviceGetPersistenceMode", gpus[i].handle))
            printf("Warning: persistence mode is disabled on device %s. See the Known Issues section of the nvidia-smi(1) "
                   "man page for more information. Run with [--help | -h] switch to get more information on how to enable "
                   "persistence mode.\n", gpus[i].bus);
        printf("Power limit for GPU %s was set to %.2f W from %.2f W.\n", gpus[i].bus, watts, before / 1000.0);
    }
    puts("All done.");
    return 0;
}

static int set_compute(const char *word)
{
    int wanted = -1;
    for (unsigned mode = 0; mode < 4; mode++)
        if (!strcasecmp(word, mode_name(mode, 1)) || (word[0] == (char)('0' + mode) && !word[1]))
            wanted = (int)mode;
    if (wanted < 0 || wanted == 1) {
        printf("Invalid argument: %s\n", word);
        return 2;
    }
    for (int i = 0; i < ngpus; i++) {
        if ((int)asked("DeviceGetComputeMode", gpus[i].handle) == wanted) {
            printf("Compute mode is already set to %s for GPU %s.\n", mode_name((unsigned)wanted, 1), gpus[i].bus);
            continue;
        }
        int code = NVML(DeviceSetComputeMode, gpus[i].handle, (unsigned)wanted);
        if (code)
            return refused("compute mode", &gpus[i], code);
        printf("Set compute mode to %s for GPU %s.\n", mode_name((unsigned)wanted, 1), gpus[i].bus);
    }
    puts("All done.");
    return 0;
}

static int lock_clocks(const char *word)
{
    unsigned low = 0, high = 0;
    int got = word ? sscanf(word, "%u,%u", &low, &high) : 0;
    if (word && got < 1) {
        printf("Invalid argument: %s\n", word);
        return 2;
    }
    for (int i = 0; i < ngpus; i++) {
        int code = word ? NVML(DeviceSetGpuLockedClocks, gpus[i].handle, low, got > 1 ? high : low)
                        : NVML(DeviceResetGpuLockedClocks, gpus[i].handle);
        if (code)
            return refused("gpu clocks", &gpus[i], code);
        if (word)
            printf("GPU clocks set to \"(gpuClkMin %u, gpuClkMax %u)\" for GPU %s\n", low, got > 1 ? high : low, gpus[i].bus);
    }
    puts("All done.");
    return 0;
}

/* ---- the command line ---- */

static const char help[] =
    "NVIDIA System Management Interface\n\n"
    "nvidia-smi [OPTION1 [ARG1]] [OPTION2 [ARG2]] ...\n\n"
    "This is the double of the lab: of the real one it knows\n"
    "    -h, --help   --version   -L, --list-gpus   -i, --id=   -l, --loop=\n"
    "    -q [-d MEMORY,UTILIZATION,ECC,TEMPERATURE,POWER,CLOCK,COMPUTE,PIDS,PERFORMANCE,ROW_REMAPPER,...]\n"
    "    --query-gpu=...   --query-compute-apps=...   --format=csv[,noheader][,nounits]\n"
    "    -pm, --persistence-mode=   -pl, --power-limit=   -c, --compute-mode=\n"
    "    -lgc, --lock-gpu-clocks=   -rgc, --reset-gpu-clocks\n"
    "    topo -m | -p2p r|w|n|a|p\n";

int main(int argc, char **argv)
{
    const char *ids = NULL, *query_list = NULL, *apps = NULL, *format = NULL, *display = NULL, *persistence = NULL,
               *power = NULL, *compute = NULL, *lock = NULL, *p2p = NULL;
    int list = 0, full = 0, matrix = 0, version = 0, reset_clocks = 0, seconds = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i], *value = strchr(word, '=');
        size_t length = value ? (size_t)(value - word) : strlen(word);
#define IS(name) (strlen(name) == length && !strncmp(word, name, length))
#define ARGUMENT (value ? value + 1 : i + 1 < argc ? argv[++i] : "")
        if (IS("-h") || IS("--help")) {
            fputs(help, stdout);
            return 0;
        } else if (IS("--version"))
            version = 1;
        else if (IS("-L") || IS("--list-gpus"))
            list = 1;
        else if (IS("-q") || IS("--query"))
            full = 1;
        else if (IS("-i") || IS("--id"))
            ids = ARGUMENT;
        else if (IS("-d") || IS("--display"))
            display = ARGUMENT;
        else if (IS("-l") || IS("--loop"))
            seconds = atoi(ARGUMENT);
        else if (IS("--query-gpu"))
            query_list = ARGUMENT;
        else if (IS("--query-compute-apps"))
            apps = ARGUMENT;
        else if (IS("--format"))
            format = ARGUMENT;
        else if (IS("-pm") || IS("--persistence-mode"))
            persistence = ARGUMENT;
        else if (IS("-pl") || IS("--power-limit"))
            power = ARGUMENT;
        else if (IS("-c") || IS("--compute-mode"))
            compute = ARGUMENT;
        else if (IS("-lgc") || IS("--lock-gpu-clocks"))
            lock = ARGUMENT;
        else if (IS("-rgc") || IS("--reset-gpu-clocks"))
            reset_clocks = 1;
        else if (i == 1 && IS("topo"))
            continue;
        else if (IS("-m") || IS("--matrix"))
            matrix = 1;
        else if (IS("-p2p") || IS("--p2pstatus"))
            p2p = ARGUMENT;
        else {
            printf("ERROR: Option %s is not recognized. Please run 'nvidia-smi -h'.\n\n", word);
            return 255;
        }
    }
    if (list && ids) {
        printf("ERROR: Option -i is not valid for this command. Please run 'nvidia-smi -h' for help.\n\n");
        return 2;
    }
    struct style style = {1, 1};
    for (const char *word = format; word && *word; word += strcspn(word, ","), word += *word == ',') {
        size_t length = strcspn(word, ",");
        if (length == 8 && !strncmp(word, "noheader", 8))
            style.header = 0;
        else if (length == 7 && !strncmp(word, "nounits", 7))
            style.units = 0;
        else if (length != 3 || strncmp(word, "csv", 3)) {
            puts("Format modifier is not recognized.");
            return 2;
        }
    }
    int what = display ? parse_displays(display) : D_ALL;
    if (!what) {
        puts("Failed to parse --display/-d flags");
        return 2;
    }
    int code = initialise();
    if (code)
        return exit_of(code);
    do {
        find_gpus(ids);
        if (version) {
            char driver[80] = "", own[80] = "";
            unsigned cuda = cuda_version();
            NVML(SystemGetDriverVersion, driver, 80u);
            NVML(SystemGetNVMLVersion, own, 80u);
            printf("NVIDIA-SMI version  : %s\nNVML version        : %s\nDRIVER version      : %s\nCUDA Version        : %u.%u\n",
                   driver, in_two_parts(own), driver, cuda / 1000, cuda % 1000 / 10);
            return 0;
        }
        if (list) {
            for (int i = 0; i < ngpus; i++)
                printf("GPU %u: %s (UUID: %s)\n", gpus[i].index, gpus[i].name, gpus[i].uuid);
            if (!ngpus && !lost_code)
                puts("No devices found.");
            return exit_of(lost_code);
        }
        if (!ngpus) {
            if (!lost_code)
                puts("No devices were found");
            return lost_code ? exit_of(lost_code) : NOT_FOUND;
        }
        code = 0;
        if (persistence)
            code = set_persistence(persistence);
        else if (power)
            code = set_power(power);
        else if (compute)
            code = set_compute(compute);
        else if (lock || reset_clocks)
            code = lock_clocks(lock);
        else if (query_list)
            code = query_gpu(query_list, style);
        else if (apps)
            code = query_apps(apps, style);
        else if (matrix)
            topology_matrix();
        else if (p2p)
            code = topology_p2p(p2p);
        else if (full || display)
            query(what);
        else
            summary();
        if (code)
            return code;
        if (seconds > 0)
            sleep((unsigned)seconds);
    } while (seconds > 0);
    NVML(Shutdown);
    return exit_of(lost_code);
}
