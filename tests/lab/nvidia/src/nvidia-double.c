/* Tells the driver of this node what to do, or mistreats a device node of this machine: `nvidia-double help`.
 * Also modprobe, rmmod and lsmod for the modules of the double, under those names. */
#include <errno.h>
#include <libgen.h>
#include <linux/capability.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <unistd.h>

#define CONTROL "/var/lib/nvidia-double/control"

/* Sends words as one line, prints the answer. Its first character is 0 or 1: went well or did not. */
static int ask(int count, char **words)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = CONTROL};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address)) {
        fprintf(stderr, "nvidia-double: no driver answers at %s: %s\n", CONTROL, strerror(errno));
        return 3;
    }
    for (int i = 0; i < count; i++)
        dprintf(fd, "%s%s", i ? " " : "", words[i]);
    dprintf(fd, "\n");
    shutdown(fd, SHUT_WR);
    char text[65536];
    size_t have = 0;
    for (ssize_t got; have < sizeof text - 1 && (got = read(fd, text + have, sizeof text - 1 - have)) > 0;)
        have += (size_t)got;
    text[have] = 0;
    int failed = text[0] != '0';
    fputs(have ? text + 1 : "", failed ? stderr : stdout);
    return failed;
}

static int node(const char *what, const char *path, const char *number)
{
    struct stat found;
    if (!strcmp(what, "hide") || !strcmp(what, "file") || !strcmp(what, "stale")) {
        int there = lstat(path, &found) == 0;
        if (there && remove(path)) {
            fprintf(stderr, "nvidia-double: %s: %s\n", path, strerror(errno));
            return 1;
        }
        if (*what == 'h')
            return 0;
        int failed = *what == 'f' ? mknod(path, S_IFREG | 0600, 0)
                                  : mknod(path, S_IFCHR | 0666, makedev((unsigned)atoi(number ? number : "508"),
                                                                        there ? minor(found.st_rdev) : 0));
        if (failed || (*what == 's' && chmod(path, 0666))) {
            fprintf(stderr, "nvidia-double: %s: %s\n", path, strerror(errno));
            return 1;
        }
        return 0;
    }
    return -1;
}

static int is_ours(const char *module)
{
    return !strncmp(module, "nvidia", 6);
}

/* Loading wants CAP_SYS_MODULE, which not every machine that holds a lab has to give. Whoever was left without
 * CAP_MKNOD gave up both. */
static int may_load(void)
{
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2];
    return syscall(SYS_capget, &header, data) == 0 && (data[0].effective >> CAP_MKNOD & 1);
}

static int pass_on(const char *name, char **argv)
{
    char path[64];
    snprintf(path, sizeof path, "/usr/lib/nvidia-double/%s", name);
    execv(path, argv);
    fprintf(stderr, "%s: %s: %s\n", name, path, strerror(errno));
    return 127;
}

int main(int argc, char **argv)
{
    const char *name = basename(argv[0]);
    if (!strcmp(name, "modprobe") || !strcmp(name, "rmmod") || !strcmp(name, "insmod")) {
        int removing = !strcmp(name, "rmmod"), code = 0, ours = 0;
        for (int i = 1; i < argc; i++) {
            removing |= !strcmp(argv[i], "-r") || !strcmp(argv[i], "--remove");
            ours |= is_ours(argv[i]);
        }
        if (!ours)
            return pass_on(name, argv);
        if (!may_load()) {
            fprintf(stderr, "%s: ERROR: Operation not permitted\n", name);
            return 1;
        }
        for (int i = 1; i < argc && !code; i++) {
            char *words[] = {removing ? "unload" : "load", argv[i]};
            if (is_ours(argv[i]))
                code = ask(2, words);
        }
        return code ? 1 : 0;
    }
    if (!strcmp(name, "lsmod")) {
        char *words[] = {"lsmod"};
        return ask(1, words);
    }
    if (!strcmp(name, "modinfo")) {
        const char *field = NULL, *module = NULL;
        for (int i = 1; i < argc; i++)
            if (!strcmp(argv[i], "-F") && i + 1 < argc)
                field = argv[++i];
            else if (argv[i][0] != '-')
                module = argv[i];
        if (!module || !is_ours(module))
            return pass_on(name, argv);
        char *words[] = {"modinfo", (char *)module, (char *)field};
        return ask(field ? 3 : 2, words);
    }
    if (argc >= 3) {
        int done = node(argv[1], argv[2], argc > 3 ? argv[3] : NULL);
        if (done >= 0)
            return done;
    }
    if (argc < 2) {
        char *words[] = {"help"};
        return ask(1, words);
    }
    return ask(argc - 1, argv + 1);
}
