/* nvidia-persistenced of the double: holds the GPUs open, persistence mode on, until it is told to stop. */
#include "client.h"

#include <getopt.h>
#include <grp.h>
#include <pwd.h>
#include <syslog.h>

static volatile sig_atomic_t ended;

static void stop(int number)
{
    (void)number;
    ended = 1;
}

static int persist(int control, const char *state, int on)
{
    int count = (int)nv_number(state, "gpus", 0), done = 0;
    for (int i = 0; i < count; i++) {
        char key[64];
        snprintf(key, sizeof key, "gpu.%d.minor", i);
        int minor = (int)nv_number(state, key, 0);
        if (on) {
            nv_prepare(minor);
            if (nv_open_gpu(minor) < 0) { /* kept open until the end */
                syslog(LOG_ERR, "device %d - failed to open.", minor);
                continue;
            }
        }
        if (!nv_code(nv_call(control, "set %d persistence %d", minor, on), 999)) {
            syslog(LOG_NOTICE, "device %d - persistence mode %s.", minor, on ? "enabled" : "disabled");
            done++;
        }
    }
    return done;
}

int main(int argc, char **argv)
{
    static const struct option options[] = {
        {"version", no_argument, 0, 'v'}, {"help", no_argument, 0, 'h'}, {"verbose", no_argument, 0, 'V'},
        {"user", required_argument, 0, 'u'}, {"group", required_argument, 0, 'g'},
        {"persistence-mode", no_argument, 0, 'p'}, {"no-persistence-mode", no_argument, 0, 'n'},
        {"uvm-persistence-mode", no_argument, 0, 'U'}, {"nvidia-cfg-path", required_argument, 0, 'c'}, {0, 0, 0, 0},
    };
    int option, on = 1, uvm = 0, control;
    const char *user = NULL;
    while ((option = getopt_long(argc, argv, "vhVu:g:", options, NULL)) != -1)
        switch (option) {
        case 'v': puts("nvidia-persistenced (double of the lab)"); return 0;
        case 'h': puts("nvidia-persistenced [--user=USER] [--no-persistence-mode] [--uvm-persistence-mode] [--verbose]"); return 0;
        case 'u': user = optarg; break;
        case 'n': on = 0; break;
        case 'U': uvm = 1; break;
        case '?': return 1;
        }
    openlog("nvidia-persistenced", LOG_PID | LOG_PERROR, LOG_DAEMON);
    nv_prepare(255);
    control = nv_open("/dev/nvidiactl");
    if (control < 0) {
        syslog(LOG_ERR, "Failed to query NVIDIA devices. Please ensure that the NVIDIA device files (/dev/nvidia*) exist, "
                        "and that user %s has read and write permissions for those files.", user ? user : "root");
        return 1;
    }
    char *state = nv_call(control, "state");
    if (on && state)
        persist(control, state, 1);
    if (uvm)
        nv_prepare(-1);
    if (mkdir("/run/nvidia-persistenced", 0755) && errno != EEXIST)
        syslog(LOG_WARNING, "no /run/nvidia-persistenced: %s", strerror(errno));
    FILE *file = fopen("/run/nvidia-persistenced/nvidia-persistenced.pid", "we");
    struct sigaction action = {.sa_handler = stop};
    sigaction(SIGTERM, &action, NULL);
    sigaction(SIGINT, &action, NULL);
    if (daemon(0, 0))
        return 1;
    if (file) {
        fprintf(file, "%d\n", getpid());
        fclose(file);
    }
    syslog(LOG_NOTICE, "Started (%d)", getpid());
    sigset_t none;
    sigemptyset(&none);
    while (!ended)
        sigsuspend(&none);
    if (on && state)
        persist(control, state, 0);
    unlink("/run/nvidia-persistenced/nvidia-persistenced.pid");
    syslog(LOG_NOTICE, "Shutdown (%d)", getpid());
    return 0;
}
