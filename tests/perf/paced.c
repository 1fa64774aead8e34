/* A paced server of server-sent events that logs when it really wrote: the truth a load generator is held against.
 *
 *   paced LOG TTFT_MS INTERVAL_MS CHUNKS TOKENS_PER_CHUNK
 *
 * Prints its port, serves /v1/models and completions until SIGTERM, then writes LOG, one line an event (seconds of
 * CLOCK_MONOTONIC):
 *   r REQUEST T          the request had arrived: the kernel's stamp of its last segment
 *   w REQUEST CHUNK T    a chunk with content was written: the moment just before write(2)
 * The first chunk of a request is due TTFT_MS after it was read; later ones come on a common beat of INTERVAL_MS, all
 * streams together, as the steps of a decoding batch do. Answer number n has the id "cmpl-n".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { FDS = 4096, EVENTS = 4 << 20, IN = 1 << 16 };

struct stream {
    char *in;
    size_t have, need; /* need: bytes of head and body, 0 while the head is not complete */
    int64_t due;       /* ns; 0 when nothing is to be written */
    uint32_t request, chunk;
    int usage; /* whether the client asks for usage at the end, in an event without a choice */
};
struct entry {
    int64_t t;
    uint32_t request, chunk; /* chunk UINT32_MAX: the request was read */
};

static struct stream streams[FDS];
static struct entry *entries;
static size_t logged;
static volatile sig_atomic_t over;
static int highest;

static void stop(int signal_number) {
    (void)signal_number;
    over = 1;
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int64_t offset; /* ns, wall clock - CLOCK_MONOTONIC */

static void calibrate(void) {
    int64_t best = INT64_MAX;
    for (int i = 0; i < 20; i++) {
        struct timespec t;
        int64_t before = now(), after;
        clock_gettime(CLOCK_REALTIME, &t);
        after = now();
        if (after - before < best) {
            best = after - before;
            offset = t.tv_sec * 1000000000LL + t.tv_nsec - (before + after) / 2;
        }
    }
}

/* read(2), and when the last of it had arrived */
static ssize_t arrived(int fd, void *data, size_t size, int64_t *when) {
    char space[CMSG_SPACE(sizeof(struct timespec))];
    struct iovec part = {data, size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    ssize_t n = recvmsg(fd, &message, 0);
    *when = now();
    struct cmsghdr *extra = n > 0 ? CMSG_FIRSTHDR(&message) : NULL;
    if (extra && extra->cmsg_type == SO_TIMESTAMPNS) {
        struct timespec t;
        memcpy(&t, CMSG_DATA(extra), sizeof t);
        *when = t.tv_sec * 1000000000LL + t.tv_nsec - offset;
    }
    return n;
}

static void note(int64_t t, uint32_t request, uint32_t chunk) {
    if (logged < EVENTS) entries[logged++] = (struct entry){t, request, chunk};
}

static void say(int fd, const char *data, size_t size) {
    while (size > 0) {
        ssize_t n = write(fd, data, size);
        if (n < 0 && errno == EAGAIN) continue; /* a client that does not read: we wait, and the log shows it */
        if (n <= 0) return;
        data += n;
        size -= (size_t)n;
    }
}

static size_t event(char *out, const char *json) {
    return (size_t)sprintf(out, "%zx\r\ndata: %s\n\n\r\n", strlen(json) + 8, json);
}

static void drop(int fd) {
    free(streams[fd].in);
    memset(&streams[fd], 0, sizeof streams[fd]);
    close(fd);
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: paced LOG TTFT_MS INTERVAL_MS CHUNKS TOKENS_PER_CHUNK\n");
        return 2;
    }
    int64_t ttft = (int64_t)(atof(argv[2]) * 1e6), interval = (int64_t)(atof(argv[3]) * 1e6);
    uint32_t chunks = (uint32_t)atoi(argv[4]), per_chunk = (uint32_t)atoi(argv[5]), requests = 0;
    static const char models[] = "{\"object\":\"list\",\"data\":[{\"id\":\"paced\",\"object\":\"model\"}]}";
    static const char head[] = "HTTP/1.1 200 OK\r\nserver: paced\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                               "transfer-encoding: chunked\r\n\r\n";
    entries = malloc(sizeof *entries * EVENTS);
    memset(entries, 0, sizeof *entries * EVENTS); /* so that no page is missing when it counts */
    signal(SIGTERM, stop);
    signal(SIGPIPE, SIG_IGN);
    calibrate();

    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), yes = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    if (bind(listener, (void *)&address, size) || listen(listener, 1024)) return 1;
    getsockname(listener, (void *)&address, &size);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    int epoll = epoll_create1(0);
    struct epoll_event watch = {.events = EPOLLIN, .data.fd = listener};
    epoll_ctl(epoll, EPOLL_CTL_ADD, listener, &watch);

    char json[1024], out[2048];
    while (!over) {
        int64_t first = 0, t = now();
        for (int fd = 0; fd <= highest; fd++) {
            struct stream *s = &streams[fd];
            if (s->due && s->due <= t) {
                size_t n = 0;
                int last = s->chunk + 1 == chunks;
                if (s->chunk == 0) n = (size_t)sprintf(out, "%s", head);
                sprintf(json,
                        "{\"id\":\"cmpl-%u\",\"object\":\"text_completion\",\"created\":1700000000,\"model\":\"paced\","
                        "\"choices\":[{\"index\":0,\"text\":\" w%05u\",\"logprobs\":null,\"finish_reason\":%s,"
                        "\"matched_stop\":null}],\"usage\":{\"prompt_tokens\":360,\"total_tokens\":%u,"
                        "\"completion_tokens\":%u,\"prompt_tokens_details\":null,\"reasoning_tokens\":0}}",
                        s->request, s->chunk, last ? "\"length\"" : "null", 360 + (s->chunk + 1) * per_chunk,
                        (s->chunk + 1) * per_chunk);
                n += event(out + n, json);
                note(now(), s->request, s->chunk);
                say(fd, out, n);
                t = now();
                s->chunk++;
                s->due = (t + interval / 2) / interval * interval + interval;
                if (last) {
                    sprintf(json,
                            "{\"id\":\"cmpl-%u\",\"object\":\"text_completion\",\"model\":\"paced\",\"choices\":[],"
                            "\"usage\":{\"prompt_tokens\":360,\"total_tokens\":%u,\"completion_tokens\":%u}}",
                            s->request, 360 + chunks * per_chunk, chunks * per_chunk);
                    n = s->usage ? event(out, json) : 0;
                    n += event(out + n, "[DONE]");
                    n += (size_t)sprintf(out + n, "0\r\n\r\n");
                    say(fd, out, n);
                    s->due = 0;
                    s->chunk = 0;
                }
            }
            if (s->due && (!first || s->due < first)) first = s->due;
        }
        struct epoll_event ready[512];
        int64_t left = first ? first - now() : 100000000;
        struct timespec wait = {left > 0 ? left / 1000000000 : 0, left > 0 ? left % 1000000000 : 0};
        int many = epoll_pwait2(epoll, ready, 512, &wait, NULL);
        for (int i = 0; i < many; i++) {
            int fd = ready[i].data.fd;
            if (fd == listener) {
                int peer;
                while ((peer = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
                    if (peer >= FDS) {
                        close(peer);
                        continue;
                    }
                    setsockopt(peer, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
                    setsockopt(peer, SOL_SOCKET, SO_TIMESTAMPNS, &yes, sizeof yes);
                    streams[peer].in = malloc(IN);
                    if (peer > highest) highest = peer;
                    watch.data.fd = peer;
                    epoll_ctl(epoll, EPOLL_CTL_ADD, peer, &watch);
                }
                continue;
            }
            struct stream *s = &streams[fd];
            int64_t when;
            ssize_t n = arrived(fd, s->in + s->have, IN - 1 - s->have, &when);
            if (n < 0 && errno == EAGAIN) continue;
            if (n <= 0) {
                drop(fd);
                continue;
            }
            s->have += (size_t)n;
            s->in[s->have] = 0;
            if (!s->need) {
                char *end = strstr(s->in, "\r\n\r\n");
                if (!end) continue;
                char *length = strcasestr(s->in, "\r\ncontent-length:");
                s->need = (size_t)(end + 4 - s->in) + (length && length < end ? (size_t)atol(length + 17) : 0);
            }
            if (s->have < s->need) continue;
            if (s->in[0] == 'P') {
                s->request = requests++;
                s->chunk = 0;
                s->usage = strstr(s->in, "\"include_usage\"") != NULL;
                s->due = now() + ttft;
                note(when, s->request, UINT32_MAX);
            } else {
                n = sprintf(out, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                            strlen(models), models);
                say(fd, out, (size_t)n);
            }
            s->have = s->need = 0;
        }
    }
    FILE *file = fopen(argv[1], "w");
    if (!file) return 1;
    for (size_t i = 0; i < logged; i++) {
        struct entry *e = &entries[i];
        double t = (double)e->t / 1e9;
        if (e->chunk == UINT32_MAX)
            fprintf(file, "r %u %.9f\n", e->request, t);
        else
            fprintf(file, "w %u %u %.9f\n", e->request, e->chunk, t);
    }
    return fclose(file) != 0;
}
