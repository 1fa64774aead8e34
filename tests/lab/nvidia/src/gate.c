/* The kernel side of the double: lets a user-space driver own character devices.
 *
 * A seccomp filter hands every open(2), openat(2), openat2(2), syslog(2) and NVIDIA ioctl(2) of a process tree to the
 * driver, which lets the kernel go on with all of them but those that concern its devices. Built as a shared library
 * and called from gate.py.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/openat2.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV
#define SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV (1UL << 5)
#endif
#ifndef SECCOMP_IOCTL_NOTIF_SET_FLAGS
#define SECCOMP_IOCTL_NOTIF_SET_FLAGS SECCOMP_IOW(4, __u64)
#define SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP (1UL << 0)
#endif
#ifndef SECCOMP_ADDFD_FLAG_SEND
#define SECCOMP_ADDFD_FLAG_SEND (1UL << 1)
#endif

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#else
#error "only x86-64 and aarch64"
#endif

#define PATH_BYTES 4096

struct event {
    uint64_t id;
    uint32_t pid; /* the calling thread, as this process sees it */
    int32_t nr;
    uint64_t args[6];
    uint64_t flags; /* of an open, whichever call it was */
    int32_t dirfd;
    char path[PATH_BYTES];
};

/* Puts the filter on this process and its descendants. Returns the listener, or -errno. */
int gate_filter(void)
{
#define ARG(n) (offsetof(struct seccomp_data, args) + 8 * (n))
    struct sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 8, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat2, 7, 0),
#ifdef SYS_open
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_open, 6, 0),
#else
        BPF_STMT(BPF_MISC | BPF_TAX, 0),
#endif
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_syslog, 5, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 3),
        /* NVIDIA's commands carry the magic 'F' and pass a structure both ways. */
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, ARG(1)),
        BPF_STMT(BPF_ALU | BPF_AND | BPF_K, 0xC000FF00u),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 0xC0000000u | ('F' << 8), 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_USER_NOTIF),
    };
    struct sock_fprog whole = {.len = sizeof program / sizeof *program, .filter = program};
    long fd = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER,
                      SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_WAIT_KILLABLE_RECV, &whole);
    return fd < 0 ? -errno : (int)fd;
}

/* Hands processor time straight to the driver and back: an open then costs some 8 microseconds, not 50. */
void gate_tune(int listener)
{
    (void)ioctl(listener, SECCOMP_IOCTL_NOTIF_SET_FLAGS, SECCOMP_USER_NOTIF_FD_SYNC_WAKE_UP);
}

static ssize_t peek(uint32_t pid, uint64_t at, void *to, size_t bytes)
{
    struct iovec here = {to, bytes}, there = {(void *)(uintptr_t)at, bytes};
    return process_vm_readv((pid_t)pid, &here, 1, &there, 1, 0);
}

int64_t gate_read(uint32_t pid, uint64_t at, void *to, uint64_t bytes)
{
    ssize_t got = peek(pid, at, to, bytes);
    return got < 0 ? -errno : got;
}

int64_t gate_write(uint32_t pid, uint64_t at, const void *from, uint64_t bytes)
{
    struct iovec here = {(void *)(uintptr_t)from, bytes}, there = {(void *)(uintptr_t)at, bytes};
    ssize_t put = process_vm_writev((pid_t)pid, &here, 1, &there, 1, 0);
    return put < 0 ? -errno : put;
}

/* A string of another process, page by page since what lies behind it need not be mapped. */
static void peek_string(uint32_t pid, uint64_t at, char *to)
{
    size_t have = 0;
    while (have < PATH_BYTES - 1) {
        size_t want = 4096 - ((at + have) & 4095);
        if (want > PATH_BYTES - 1 - have)
            want = PATH_BYTES - 1 - have;
        ssize_t got = peek(pid, at + have, to + have, want);
        if (got <= 0)
            break;
        if (memchr(to + have, 0, (size_t)got))
            return;
        have += (size_t)got;
    }
    to[have] = 0;
}

static int concerns_us(const char *path)
{
    return strstr(path, "nvidia") || strstr(path, "/dev/char/") || !strcmp(path, "/proc/devices") ||
           !strcmp(path, "/proc/modules") || !strcmp(path, "/dev/kmsg");
}

int gate_continue(int listener, uint64_t id)
{
    struct seccomp_notif_resp answer = {.id = id, .flags = SECCOMP_USER_NOTIF_FLAG_CONTINUE};
    return ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer) ? -errno : 0;
}

int gate_answer(int listener, uint64_t id, int64_t value, int error)
{
    struct seccomp_notif_resp answer = {.id = id, .val = error ? 0 : value, .error = -error};
    return ioctl(listener, SECCOMP_IOCTL_NOTIF_SEND, &answer) ? -errno : 0;
}

/* The open succeeds with a copy of fd in the caller. */
int gate_give(int listener, uint64_t id, int fd, int cloexec)
{
    struct seccomp_notif_addfd gift = {
        .id = id, .flags = SECCOMP_ADDFD_FLAG_SEND, .srcfd = (uint32_t)fd, .newfd_flags = cloexec ? O_CLOEXEC : 0};
    return ioctl(listener, SECCOMP_IOCTL_NOTIF_ADDFD, &gift) < 0 ? -errno : 0;
}

/* Waits for a call that may concern the driver; lets the kernel go on with every other. 1: an event; 0: all
 * processes with the filter are gone. */
int gate_next(int listener, struct event *event)
{
    for (;;) {
        struct pollfd ready = {.fd = listener, .events = POLLIN};
        if (poll(&ready, 1, -1) < 0)
            continue;
        if (!(ready.revents & POLLIN)) {
            if (ready.revents & (POLLHUP | POLLERR | POLLNVAL))
                return 0;
            continue;
        }
        struct seccomp_notif call = {0};
        if (ioctl(listener, SECCOMP_IOCTL_NOTIF_RECV, &call))
            continue; /* the caller was killed meanwhile */
        event->id = call.id;
        event->pid = call.pid;
        event->nr = call.data.nr;
        memcpy(event->args, call.data.args, sizeof event->args);
        event->path[0] = 0;
        event->dirfd = AT_FDCWD;
        event->flags = 0;
        switch (call.data.nr) {
#ifdef SYS_open
        case SYS_open:
            peek_string(call.pid, call.data.args[0], event->path);
            event->flags = call.data.args[1];
            break;
#endif
        case SYS_openat:
            peek_string(call.pid, call.data.args[1], event->path);
            event->dirfd = (int32_t)call.data.args[0];
            event->flags = call.data.args[2];
            break;
        case SYS_openat2: {
            struct open_how how = {0};
            peek_string(call.pid, call.data.args[1], event->path);
            event->dirfd = (int32_t)call.data.args[0];
            if (peek(call.pid, call.data.args[2], &how, sizeof how) == sizeof how)
                event->flags = how.flags;
            break;
        }
        default:
            return 1;
        }
        if (concerns_us(event->path))
            return 1;
        gate_continue(listener, call.id);
    }
}
