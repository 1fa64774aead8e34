/* How the libraries and tools of the double reach its driver, and how they see to the device nodes as NVIDIA's do. */
#ifndef CLIENT_H
#define CLIENT_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- talking to the driver: one ioctl, text both ways ---- */

struct nv_call {
    uint64_t request, request_bytes, answer, answer_room, answer_bytes;
};
#define NV_CALL _IOWR('F', 0xDD, struct nv_call)

/* The answer, to be freed, or NULL with errno: ENOTTY or EINVAL when fd is no device of the driver. */
__attribute__((unused, format(printf, 2, 3))) static char *nv_call(int fd, const char *format, ...)
{
    char request[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(request, sizeof request, format, arguments);
    va_end(arguments);
    size_t room = 64 * 1024;
    char *answer = malloc(room);
    if (!answer)
        return NULL;
    struct nv_call call = {(uintptr_t)request, (uint64_t)length, (uintptr_t)answer, room - 1, 0};
    if (ioctl(fd, NV_CALL, &call)) {
        int error = errno;
        free(answer);
        errno = error;
        return NULL;
    }
    answer[call.answer_bytes < room ? call.answer_bytes : room - 1] = 0;
    return answer;
}

/* 0 for "ok", the code of "error CODE", `otherwise` when there was no such answer. Frees the answer. */
__attribute__((unused)) static int nv_code(char *answer, int otherwise)
{
    int code = otherwise;
    if (answer && !strncmp(answer, "ok", 2))
        code = 0;
    else if (answer)
        (void)sscanf(answer, "error %d", &code);
    free(answer);
    return code;
}

/* Value of `key` in lines of "key value", copied to `into`. 0: there is none. */
__attribute__((unused)) static int nv_find(const char *state, const char *key, char *into, size_t room)
{
    size_t length = strlen(key);
    for (const char *line = state; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
        if (!strncmp(line, key, length) && line[length] == ' ') {
            const char *value = line + length + 1, *end = strchr(value, '\n');
            size_t size = end ? (size_t)(end - value) : strlen(value);
            if (size >= room)
                size = room - 1;
            memcpy(into, value, size);
            into[size] = 0;
            return 1;
        }
    }
    if (room)
        into[0] = 0;
    return 0;
}

__attribute__((unused)) static long long nv_number(const char *state, const char *key, long long otherwise)
{
    char text[64];
    return nv_find(state, key, text, sizeof text) ? strtoll(text, NULL, 0) : otherwise;
}

/* ---- versions ---- */

/* The version a library carries is that of its file's name: libcuda.so.595.71.05. */
__attribute__((unused)) static void nv_own_version(char *into, size_t room)
{
    Dl_info info;
    char real[PATH_MAX];
    const char *found = NULL;
    if (dladdr((void *)(uintptr_t)nv_own_version, &info) && info.dli_fname && realpath(info.dli_fname, real))
        found = strstr(basename(real), ".so.");
    snprintf(into, room, "%s", found ? found + 4 : "0.0.0");
}

/* CUDA version a driver branch speaks, as cuDriverGetVersion gives it. */
__attribute__((unused)) static int nv_cuda_version(const char *driver)
{
    static const struct { int branch, cuda; } known[] = {
        {610, 13030}, {595, 13020}, {590, 13010}, {580, 13000}, {575, 12090}, {570, 12080}, {565, 12070},
        {560, 12060}, {555, 12050}, {550, 12040}, {545, 12030}, {535, 12020}, {530, 12010}, {525, 12000}, {0, 11080},
    };
    int branch = atoi(driver), i = 0;
    while (known[i].branch > branch)
        i++;
    return known[i].cuda;
}

/* ---- device nodes ---- */

#define NV_FIXED_MAJOR 195

__attribute__((unused)) static int nv_module_loaded(const char *name)
{
    char path[128];
    snprintf(path, sizeof path, "/sys/module/%s/initstate", name);
    return access(path, R_OK) == 0;
}

__attribute__((unused)) static int nv_run(char *const argv[])
{
    int status = -1;
    struct sigaction old, usual = {.sa_handler = SIG_DFL};
    sigaction(SIGCHLD, &usual, &old);
    pid_t pid = fork();
    if (pid == 0) {
        int null = open("/dev/null", O_RDWR);
        if (null >= 0) {
            dup2(null, 1);
            dup2(null, 2);
        }
        execv(argv[0], argv);
        _exit(127);
    }
    if (pid > 0)
        while (waitpid(pid, &status, 0) < 0 && errno == EINTR)
            ;
    sigaction(SIGCHLD, &old, NULL);
    return pid > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* Loads a module that is not loaded, if root. */
__attribute__((unused)) static int nv_load_module(const char *name, const char *written)
{
    if (nv_module_loaded(name))
        return 1;
    if (geteuid() != 0 || access("/sbin/modprobe", X_OK))
        return 0;
    char *argv[] = {"/sbin/modprobe", (char *)written, NULL};
    nv_run(argv);
    return nv_module_loaded(name);
}

/* Today's major of a driver by its name in /proc/devices, or -1. */
__attribute__((unused)) static int nv_major(const char *name)
{
    FILE *file = fopen("/proc/devices", "re");
    char line[128], found[100];
    int major = -1, number;
    if (!file)
        return -1;
    while (fgets(line, sizeof line, file) && strncmp(line, "Block", 5))
        if (sscanf(line, "%d %99s", &number, found) == 2 && !strcmp(found, name))
            major = number;
    fclose(file);
    return major;
}

struct nv_node_rules {
    unsigned uid, gid, mode, modify;
};

/* Owner and mode the driver wants for nodes; `file` is NULL for those of nvidia-uvm, which have no say. */
__attribute__((unused)) static struct nv_node_rules nv_rules(const char *file)
{
    struct nv_node_rules rules = {0, 0, 0666, 1};
    FILE *params = file ? fopen(file, "re") : NULL;
    char name[64];
    unsigned value;
    while (params && fscanf(params, "%63[^:]: %u\n", name, &value) == 2) {
        if (!strcmp(name, "DeviceFileUID"))
            rules.uid = value;
        else if (!strcmp(name, "DeviceFileGID"))
            rules.gid = value;
        else if (!strcmp(name, "DeviceFileMode"))
            rules.mode = value;
        else if (!strcmp(name, "ModifyDeviceFiles") || !strcmp(name, "DeviceFileModify"))
            rules.modify = value;
    }
    if (params)
        fclose(params);
    return rules;
}

#define NV_PARAMS "/proc/driver/nvidia/params"

/* Sees that `path` is the node of these numbers: a wrong one is removed and made anew, rights are set. As NVIDIA's
 * helper does it, the wrong one is gone even when the new one cannot be made. 1: it is as it should be. */
__attribute__((unused)) static int nv_make_node(const char *path, int major, int minor, const char *params)
{
    struct nv_node_rules rules = nv_rules(params);
    dev_t device = makedev((unsigned)major, (unsigned)minor);
    struct stat found;
    char link[64], target[128];
    int there = stat(path, &found) == 0;
    if (rules.modify == 1) {
        int right = there && S_ISCHR(found.st_mode) && found.st_rdev == device;
        if (there && !right && remove(path))
            return 0;
        if (!right && mknod(path, S_IFCHR | rules.mode, device))
            return 0;
        if (!right || (found.st_mode & 0777) != rules.mode || found.st_uid != rules.uid || found.st_gid != rules.gid) {
            if (chmod(path, rules.mode) || chown(path, rules.uid, rules.gid)) {
                if (!right)
                    remove(path);
                return 0;
            }
        }
    } else if (!there)
        return 0;
    snprintf(link, sizeof link, "/dev/char/%d:%d", major, minor);
    snprintf(target, sizeof target, "../%s", path + strlen("/dev/"));
    char was[128];
    ssize_t length = readlink(link, was, sizeof was - 1);
    if (length < 0 || (was[length] = 0, strcmp(was, target))) {
        (void)!remove(link);
        (void)!symlink(target, link);
    }
    return 1;
}

__attribute__((unused)) static int nv_make_gpu_node(int minor)
{
    char path[64];
    if (minor == 255)
        return nv_make_node("/dev/nvidiactl", NV_FIXED_MAJOR, 255, NV_PARAMS);
    if (minor == 254)
        return nv_make_node("/dev/nvidia-modeset", NV_FIXED_MAJOR, 254, NV_PARAMS);
    snprintf(path, sizeof path, "/dev/nvidia%d", minor);
    return nv_make_node(path, NV_FIXED_MAJOR, minor, NV_PARAMS);
}

__attribute__((unused)) static int nv_make_uvm_nodes(int base)
{
    int major = nv_major("nvidia-uvm");
    return major >= 0 && nv_make_node("/dev/nvidia-uvm", major, base, NULL) &&
           nv_make_node("/dev/nvidia-uvm-tools", major, base + 1, NULL);
}

/* A node of MIG's rights, from its file below /proc/driver. */
__attribute__((unused)) static int nv_make_capability_node(const char *file)
{
    int major = nv_major("nvidia-caps"), minor = -1, value;
    char name[64], path[64];
    FILE *access = major < 0 || strncmp(file, "/proc/driver/", 13) || strstr(file, "./") ? NULL : fopen(file, "re");
    if (!access)
        return 0;
    while (fscanf(access, "%63[^:]: %d\n", name, &value) == 2)
        if (!strcmp(name, "DeviceFileMinor"))
            minor = value;
    fclose(access);
    if (minor < 0 || (mkdir("/dev/nvidia-caps", 0755) && errno != EEXIST))
        return 0;
    snprintf(path, sizeof path, "/dev/nvidia-caps/nvidia-cap%d", minor);
    return nv_make_node(path, major, minor, file);
}

/* What the libraries do before they open a node: load the module, mend the node, and if they may not, have the
 * setuid nvidia-modprobe do it. `minor` is one of the fixed major, or -1 for nvidia-uvm. Whether it helped is seen
 * when the node is opened. */
__attribute__((unused)) static void nv_prepare(int minor)
{
    char number[16];
    snprintf(number, sizeof number, "%d", minor < 0 ? 0 : minor);
    const char *module = minor < 0 ? "nvidia_uvm" : "nvidia";
    int ready = nv_load_module(module, minor < 0 ? "nvidia-uvm" : "nvidia");
    ready = (minor < 0 ? nv_make_uvm_nodes(0) : nv_make_gpu_node(minor)) && ready;
    if (!ready && geteuid() != 0 && access("/usr/bin/nvidia-modprobe", X_OK) == 0) {
        char *gpu[] = {"/usr/bin/nvidia-modprobe", "-c", number, NULL};
        char *uvm[] = {"/usr/bin/nvidia-modprobe", "-c", number, "-u", NULL};
        nv_run(minor < 0 ? uvm : gpu);
    }
}

/* Opens a node and asks who is there. -errno: what open said, or ENOTTY when it is no device of the driver. */
__attribute__((unused)) static int nv_open(const char *path)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    char *answer = nv_call(fd, "hello");
    if (!answer || (errno = ENOTTY, !strncmp(answer, "error", 5))) {
        int error = errno;
        free(answer);
        close(fd);
        return -error;
    }
    free(answer);
    return fd;
}

__attribute__((unused)) static int nv_open_gpu(int minor)
{
    char path[64];
    snprintf(path, sizeof path, "/dev/nvidia%d", minor);
    return nv_open(path);
}

#endif
