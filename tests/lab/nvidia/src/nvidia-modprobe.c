/* nvidia-modprobe of the double: loads the modules and makes the device nodes, with the options of the real one. */
#include "client.h"

#include <getopt.h>

static int number(const char *text)
{
    char *end;
    long value = strtol(text, &end, 0);
    if (end == text || *end) {
        fprintf(stderr, "nvidia-modprobe: error: Error parsing argument \"%s\" as an integer value.\n", text);
        exit(1);
    }
    return (int)value;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"version", no_argument, 0, 'v'}, {"help", no_argument, 0, 'h'},
        {"create-nvidia-device-file", required_argument, 0, 'c'}, {"unified-memory", no_argument, 0, 'u'},
        {"modeset", no_argument, 0, 'm'}, {"nvswitch", no_argument, 0, 's'}, {"nvlink", no_argument, 0, 'l'},
        {"nvidia-capability-device-file", required_argument, 0, 'f'}, {0, 0, 0, 0},
    };
    int minors[64], nminors = 0, nfiles = 0, uvm = 0, modeset = 0, nvlink = 0, option;
    const char *files[256];
    umask(0);
    while ((option = getopt_long(argc, argv, "vhc:umslf:", options, NULL)) != -1)
        switch (option) {
        case 'v':
            puts("\nnvidia-modprobe (double of the lab)\n");
            return 0;
        case 'h':
            puts("\nnvidia-modprobe [options]\n\n"
                 "  -c, --create-nvidia-device-file=MINOR-NUMBER\n  -u, --unified-memory\n  -m, --modeset\n"
                 "  -l, --nvlink\n  -s, --nvswitch\n  -f, --nvidia-capability-device-file=FILE\n");
            return 0;
        case 'c':
            if (nminors == 64)
                return 1;
            minors[nminors++] = number(optarg);
            break;
        case 'u': uvm = 1; break;
        case 'm': modeset = 1; break;
        case 'l': case 's': nvlink = 1; break;
        case 'f':
            if (nfiles == 256)
                return 1;
            files[nfiles++] = optarg;
            break;
        default:
            fprintf(stderr, "\nERROR: Invalid commandline, please run `%s --help` for usage information.\n\n", argv[0]);
            return 1;
        }
    if (!nv_load_module(uvm ? "nvidia_uvm" : "nvidia", uvm ? "nvidia-uvm" : "nvidia"))
        return 1;
    if (nvlink) {
        int major = nv_major("nvidia-nvlink");
        if (major < 0 || !nv_make_node("/dev/nvidia-nvlink", major, 0, "/proc/driver/nvidia-nvlink/permissions"))
            return 1;
    }
    for (int i = 0; i < nminors && !nvlink; i++)
        if (!(uvm ? nv_make_uvm_nodes(minors[i]) : nv_make_gpu_node(minors[i])))
            return 1;
    if (modeset && (!nv_load_module("nvidia_modeset", "nvidia-modeset") || !nv_make_gpu_node(254)))
        return 1;
    for (int i = 0; i < nfiles; i++)
        if (!nv_make_capability_node(files[i]))
            return 1;
    return 0;
}
