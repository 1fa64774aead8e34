/* What would the kernel itself answer to an open? Finds it out with children that stand in the caller's place: its
 * cgroup, its root and working directory, its ids and capabilities. gate.py asks on stdin and reads on stdout; a small
 * program of its own, since it forks at every open of a device. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

struct request {
    uint32_t pid;
    uint32_t uid, gid; /* fsuid and fsgid, as this process's user namespace has them */
    int32_t own_users; /* the caller has a user namespace of its own */
    uint64_t caps;     /* its effective capabilities, in its user namespace */
    uint64_t flags;
    int32_t dirfd;
    uint32_t ngroups;
    uint32_t groups[64];
    char cgroup[1024]; /* cgroup.procs of its cgroup, or empty */
    char path[4096];
};

/* Exits with the errno of the open, or with 200 and more when it could not take the caller's place. */
static void as_caller(const struct request *who)
{
    char place[64];
    if (who->cgroup[0]) {
        int group = open(who->cgroup, O_WRONLY | O_CLOEXEC);
        if (group < 0 || write(group, "0", 1) != 1)
            _exit(201);
        close(group);
    }
    int users = -1;
    if (who->own_users) {
        snprintf(place, sizeof place, "/proc/%u/ns/user", who->pid);
        users = open(place, O_RDONLY | O_CLOEXEC);
        if (users < 0)
            _exit(202);
    }
    if (who->path[0] != '/') {
        if (who->dirfd == AT_FDCWD)
            snprintf(place, sizeof place, "/proc/%u/cwd", who->pid);
        else
            snprintf(place, sizeof place, "/proc/%u/fd/%d", who->pid, who->dirfd);
        if (chdir(place))
            _exit(203);
    }
    snprintf(place, sizeof place, "/proc/%u/root", who->pid);
    if (chroot(place))
        _exit(204);
    if (syscall(SYS_setgroups, (size_t)who->ngroups, who->groups))
        _exit(205);
    setfsgid(who->gid);
    setfsuid(who->uid);
    /* What capabilities of a user namespace are worth here, the kernel knows. */
    if (users >= 0 && setns(users, CLONE_NEWUSER))
        _exit(206);
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct sets[2];
    if (syscall(SYS_capget, &header, sets))
        _exit(207);
    sets[0].effective = sets[0].permitted & (uint32_t)who->caps;
    sets[1].effective = sets[1].permitted & (uint32_t)(who->caps >> 32);
    if (syscall(SYS_capset, &header, sets))
        _exit(208);
    int flags = (int)(who->flags & (O_ACCMODE | O_NOFOLLOW)) | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
    _exit(open(who->path, flags) < 0 ? errno : 0);
}

/* errno, 0, or -1: cannot be told. */
static int32_t attempt(const struct request *who)
{
    int status = 0;
    pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        as_caller(who);
    }
    if (child < 0)
        return -1;
    struct pollfd ended = {.fd = (int)syscall(SYS_pidfd_open, child, 0), .events = POLLIN};
    if (ended.fd < 0 || poll(&ended, 1, 2000) != 1) /* its cgroup may be frozen */
        kill(child, SIGKILL);
    waitpid(child, &status, 0);
    close(ended.fd);
    return WIFEXITED(status) && WEXITSTATUS(status) < 200 ? WEXITSTATUS(status) : -1;
}

int main(void)
{
    struct request request;
    while (read(0, &request, sizeof request) == sizeof request) {
        int32_t answer = attempt(&request);
        if (write(1, &answer, sizeof answer) != sizeof answer)
            return 1;
    }
    return 0;
}
