/*
 * A client of nsqd's protocols that takes little of the machine's time. tools/bench/gateway.py
 * measures nsqd and shmq's gateway with it, so that the cost of no client library is in the figures.
 *
 *     nsq_client pub|mpub|sub|http-pub|http-mpub|roundtrip --address IPV4:PORT --topic NAME
 *                [--seconds S] [--connections N] [--size BYTES] [--batch N] [--ready N] [--cpus A,B]
 *
 * pub, mpub: each connection has a thread, which sends a PUB, or an MPUB of --batch bodies, waits for
 * its OK and sends the next. http-pub, http-mpub: the same by POST over connections that stay open.
 * sub: each connection has a thread, which takes what is there with RDY --ready and finishes each
 * message. It ends early when nothing comes for a moment. roundtrip: this process publishes to the
 * topic, another one publishes a message to NAME-back for each that it takes, and this one waits for
 * it; both finish what they take. Both have one connection to publish and one, with RDY 1, to take.
 * --cpus: this process runs on A only, the other one of a round trip on B.
 * Prints one JSON object. Exit status 0; 1 with a sentence on stderr.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SECOND INT64_C(1000000000)
#define QUIET_MS 500 /* without a message that tell `sub` that it had the last one */
#define CONNECTIONS_MAX 64
#define SAMPLES_MAX 4000000u
#define INPUT_BYTES (1u << 20)
#define FIN_BYTES 21 /* FIN, a space, the id, a line feed */
#define CHANNEL "bench"

enum frame_type { RESPONSE = 0, MESSAGE = 2 };

/* A message's frame: timestamp, attempts, id, body. */
enum { ID_AT = 10, ID_BYTES = 16, BODY_AT = 26 };

static struct options {
	const char *mode, *topic;
	struct sockaddr_in address;
	double seconds;
	uint32_t connections, size, batch, ready;
	int cpus[2]; /* -1: wherever the kernel likes */
} options = {
	.seconds = 1.0, .connections = 1, .size = 200, .batch = 200, .ready = 2500, .cpus = {-1, -1}};

struct connection {
	int fd;
	size_t begin, end; /* of what was read and not yet used */
	char data[INPUT_BYTES];
};

struct frame {
	uint32_t type, size;
	const char *body; /* valid until the next read */
};

/* Bytes to send, and the number of messages in them. */
struct request {
	size_t size;
	uint32_t messages;
	char *data;
};

struct worker {
	pthread_t thread;
	int64_t began, ended;
	uint64_t messages;
};

static pthread_barrier_t start;

static int64_t now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * SECOND + time.tv_nsec;
}

static void die(const char *what, const char *why)
{
	fprintf(stderr, "nsq_client %s: %s: %s\n", options.mode, what, why);
	exit(1);
}

static void check(const char *what, bool good)
{
	if (!good)
		die(what, strerror(errno));
}

static void *memory(size_t size)
{
	void *found = malloc(size);

	check("malloc", found != NULL);
	return found;
}

static void run_on(int cpu)
{
	cpu_set_t cpus;

	if (cpu < 0)
		return;
	CPU_ZERO(&cpus);
	CPU_SET((size_t)cpu, &cpus);
	check("sched_setaffinity", sched_setaffinity(0, sizeof(cpus), &cpus) == 0);
}

/* ---- connections ----------------------------------------------------------------------------- */

static void send_all(int fd, const char *data, size_t size)
{
	while (size > 0) {
		ssize_t sent = send(fd, data, size, MSG_NOSIGNAL);

		check("send", sent > 0);
		data += sent;
		size -= (size_t)sent;
	}
}

static void wait_at_most(struct connection *c, struct timeval time)
{
	check("SO_RCVTIMEO", setsockopt(c->fd, SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time)) == 0);
}

static struct connection *open_connection(void)
{
	struct connection *c = memory(sizeof(*c));
	struct timeval patience = {.tv_sec = 10};
	int yes = 1;

	c->begin = c->end = 0;
	c->fd = socket(AF_INET, SOCK_STREAM, 0);
	check("socket", c->fd >= 0);
	check("connect",
	      connect(c->fd, (const struct sockaddr *)&options.address, sizeof(options.address)) == 0);
	check("TCP_NODELAY", setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes)) == 0);
	wait_at_most(c, patience);
	return c;
}

static void close_connection(struct connection *c)
{
	close(c->fd);
	free(c);
}

/* Reads more. False: nothing came within the connection's time-out. */
static bool fill(struct connection *c)
{
	ssize_t got;

	if (c->begin > 0) {
		memmove(c->data, c->data + c->begin, c->end - c->begin);
		c->end -= c->begin;
		c->begin = 0;
	}
	if (c->end == sizeof(c->data) - 1)
		die("answer", "it is too long");
	got = recv(c->fd, c->data + c->end, sizeof(c->data) - 1 - c->end, 0);
	if (got < 0 && errno == EAGAIN)
		return false;
	check("recv", got >= 0);
	if (got == 0)
		die("recv", "the server ended the connection");
	c->end += (size_t)got;
	return true;
}

/* ---- nsqd's TCP protocol --------------------------------------------------------------------- */

static char *put_u32(char *to, uint32_t number)
{
	number = htonl(number);
	return (char *)memcpy(to, &number, sizeof(number)) + sizeof(number);
}

static uint32_t get_u32(const char *from)
{
	uint32_t number;

	memcpy(&number, from, sizeof(number));
	return ntohl(number);
}

/* The next frame, if all of it was read already. */
static bool has_frame(struct connection *c, struct frame *frame)
{
	size_t held = c->end - c->begin;
	const char *at = c->data + c->begin;

	if (held < 8 || held - 4 < get_u32(at))
		return false;
	frame->size = get_u32(at) - 4;
	frame->type = get_u32(at + 4);
	frame->body = at + 8;
	c->begin += 8 + frame->size;
	return true;
}

static bool says(const struct frame *frame, const char *words)
{
	return frame->type == RESPONSE && frame->size == strlen(words) &&
	       memcmp(frame->body, words, frame->size) == 0;
}

/* The next frame that is no heartbeat. False: nothing came within the connection's time-out. */
static bool next_frame(struct connection *c, struct frame *frame)
{
	for (;;) {
		while (!has_frame(c, frame)) {
			if (!fill(c))
				return false;
		}
		if (!says(frame, "_heartbeat_"))
			return true;
		send_all(c->fd, "NOP\n", 4);
	}
}

static void unexpected(const struct frame *frame)
{
	char words[100];

	snprintf(words, sizeof(words), "type %u, %.*s", frame->type,
	         (int)(frame->size < 60 ? frame->size : 60), frame->body);
	die("unexpected frame", words);
}

static void await_ok(struct connection *c)
{
	struct frame frame;

	if (!next_frame(c, &frame))
		die("OK", "it did not come in time");
	if (!says(&frame, "OK"))
		unexpected(&frame);
}

static struct connection *open_tcp(void)
{
	struct connection *c = open_connection();

	send_all(c->fd, "  V2", 4);
	return c;
}

static struct connection *subscribe(const char *topic, uint32_t ready)
{
	struct connection *c = open_tcp();
	char words[200];
	int size = snprintf(words, sizeof(words), "SUB %s %s\n", topic, CHANNEL);

	send_all(c->fd, words, (size_t)size);
	await_ok(c);
	size = snprintf(words, sizeof(words), "RDY %u\n", ready);
	send_all(c->fd, words, (size_t)size);
	return c;
}

/* Puts FIN of the frame's message. */
static char *put_fin(char *to, const struct frame *message)
{
	if (message->type != MESSAGE || message->size < BODY_AT)
		unexpected(message);
	memcpy(to, "FIN ", 4);
	memcpy(to + 4, message->body + ID_AT, ID_BYTES);
	to[FIN_BYTES - 1] = '\n';
	return to + FIN_BYTES;
}

/* Bodies of x, each after its size, as MPUB has them. */
static char *put_bodies(char *to)
{
	to = put_u32(to, options.batch);
	for (uint32_t i = 0; i < options.batch; i++) {
		to = put_u32(to, options.size);
		memset(to, 'x', options.size);
		to += options.size;
	}
	return to;
}

static uint32_t bodies_size(void)
{
	return 4 + options.batch * (4 + options.size);
}

static struct request pub(const char *topic)
{
	struct request made = {.messages = 1, .data = memory(200 + options.size)};
	char *at = made.data + snprintf(made.data, 200, "PUB %s\n", topic);

	at = put_u32(at, options.size);
	memset(at, 'x', options.size);
	made.size = (size_t)(at + options.size - made.data);
	return made;
}

static struct request mpub(const char *topic)
{
	struct request made = {.messages = options.batch, .data = memory(200 + bodies_size())};
	char *at = made.data + snprintf(made.data, 200, "MPUB %s\n", topic);

	made.size = (size_t)(put_bodies(put_u32(at, bodies_size())) - made.data);
	return made;
}

/* ---- HTTP ------------------------------------------------------------------------------------ */

static struct request post(const char *path, uint32_t size, uint32_t messages)
{
	struct request made = {.messages = messages, .data = memory(400 + size)};

	made.size = (size_t)snprintf(
			made.data, 400, "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %u\r\n\r\n",
			path, size);
	return made;
}

static struct request http_pub(const char *topic)
{
	char path[200];
	struct request made;

	snprintf(path, sizeof(path), "/pub?topic=%s", topic);
	made = post(path, options.size, 1);
	memset(made.data + made.size, 'x', options.size);
	made.size += options.size;
	return made;
}

static struct request http_mpub(const char *topic)
{
	char path[200];
	struct request made;

	snprintf(path, sizeof(path), "/mpub?binary=true&topic=%s", topic);
	made = post(path, bodies_size(), options.batch);
	made.size = (size_t)(put_bodies(made.data + made.size) - made.data);
	return made;
}

static void await_200(struct connection *c)
{
	static const char length[] = "content-length:";
	const char *found, *head_end;
	size_t whole;

	do {
		if (!fill(c))
			die("answer", "it did not come in time");
		c->data[c->end] = '\0';
		head_end = strstr(c->data, "\r\n\r\n");
	} while (head_end == NULL);
	if (strncmp(c->data, "HTTP/1.1 200 ", 13) != 0)
		die("answer", c->data);
	found = strcasestr(c->data, length);
	if (found == NULL || found > head_end)
		die("answer without a length", c->data);
	whole = (size_t)(head_end + 4 - c->data) + strtoul(found + strlen(length), NULL, 10);
	while (c->end < whole && fill(c))
		;
	c->begin = c->end = 0; /* one answer at a time */
}

/* ---- the modes ------------------------------------------------------------------------------- */

struct publishing {
	const char *mode;
	struct request (*make)(const char *topic);
	struct connection *(*open)(void);
	void (*await)(struct connection *c);
};

static const struct publishing publishings[] = {
	{"pub", pub, open_tcp, await_ok},
	{"mpub", mpub, open_tcp, await_ok},
	{"http-pub", http_pub, open_connection, await_200},
	{"http-mpub", http_mpub, open_connection, await_200},
};

static const struct publishing *publishing;

static void *publish_loop(void *argument)
{
	struct worker *worker = argument;
	struct connection *c = publishing->open();
	struct request request = publishing->make(options.topic);
	int64_t end;

	pthread_barrier_wait(&start);
	worker->began = worker->ended = now();
	end = worker->began + (int64_t)(options.seconds * SECOND);
	while (worker->ended < end) {
		send_all(c->fd, request.data, request.size);
		publishing->await(c);
		worker->messages += request.messages;
		worker->ended = now();
	}
	free(request.data);
	close_connection(c);
	return NULL;
}

static void *subscribe_loop(void *argument)
{
	struct worker *worker = argument;
	struct timeval quiet = {.tv_usec = QUIET_MS * 1000};
	struct connection *c;
	struct frame frame;
	char *fins = memory(INPUT_BYTES);
	int64_t end;

	pthread_barrier_wait(&start);
	c = subscribe(options.topic, options.ready);
	wait_at_most(c, quiet);
	worker->began = worker->ended = now();
	end = worker->began + (int64_t)(options.seconds * SECOND);
	while (worker->ended < end && next_frame(c, &frame)) {
		char *at = put_fin(fins, &frame);

		/* a frame has more bytes than its FIN, so that these have room */
		while (has_frame(c, &frame)) {
			if (!says(&frame, "_heartbeat_"))
				at = put_fin(at, &frame);
		}
		send_all(c->fd, fins, (size_t)(at - fins));
		worker->messages += (uint64_t)(at - fins) / FIN_BYTES;
		worker->ended = now();
	}
	free(fins);
	close_connection(c);
	return NULL;
}

static void run_workers(void *(*loop)(void *))
{
	static struct worker workers[CONNECTIONS_MAX];
	uint64_t messages = 0;
	int64_t began = INT64_MAX, ended = 0;

	pthread_barrier_init(&start, NULL, options.connections);
	for (uint32_t i = 0; i < options.connections; i++) {
		errno = pthread_create(&workers[i].thread, NULL, loop, &workers[i]);
		check("pthread_create", errno == 0);
	}
	for (uint32_t i = 0; i < options.connections; i++) {
		struct worker *worker = &workers[i];

		pthread_join(worker->thread, NULL);
		messages += worker->messages;
		began = worker->began < began ? worker->began : began;
		ended = worker->ended > ended ? worker->ended : ended;
	}
	printf("{\"messages\": %llu, \"seconds\": %.9f}\n", (unsigned long long)messages,
	       (double)(ended - began) / SECOND);
}

/* ---- there and back -------------------------------------------------------------------------- */

/* One process of a round trip: where it publishes, what it publishes, where it takes. */
struct side {
	struct connection *out, *in;
	struct request request;
};

static struct side open_side(const char *to, const char *from)
{
	return (struct side){.in = subscribe(from, 1), .out = open_tcp(), .request = pub(to)};
}

static void await_message(const struct side *side)
{
	char fin[FIN_BYTES];
	struct frame frame;

	if (!next_frame(side->in, &frame))
		die("message", "it did not come in time");
	put_fin(fin, &frame);
	if (frame.size != BODY_AT + options.size)
		unexpected(&frame);
	send_all(side->in->fd, fin, FIN_BYTES);
}

static void answer_loop(const char *there, const char *back)
{
	struct side side = open_side(back, there);

	for (;;) {
		await_message(&side);
		send_all(side.out->fd, side.request.data, side.request.size);
		await_ok(side.out);
	}
}

static void ask(const struct side *side)
{
	send_all(side->out->fd, side->request.data, side->request.size);
	await_message(side);
	await_ok(side->out); /* it came before the answer */
}

static int compare(const void *left, const void *right)
{
	int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;

	return (a > b) - (a < b);
}

static void round_trips(void)
{
	int64_t *samples = memory(SAMPLES_MAX * sizeof(*samples));
	int64_t began, before, end;
	uint32_t count = 0;
	struct side side;
	char back[200];
	pid_t child;

	snprintf(back, sizeof(back), "%s-back", options.topic);
	child = fork();
	check("fork", child >= 0);
	if (child == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		run_on(options.cpus[1]);
		answer_loop(options.topic, back);
	}
	run_on(options.cpus[0]);
	side = open_side(options.topic, back);
	ask(&side); /* the other side is there, and all that is made once is made */
	began = before = now();
	end = began + (int64_t)(options.seconds * SECOND);
	while (before < end && count < SAMPLES_MAX) {
		int64_t after;

		ask(&side);
		after = now();
		samples[count++] = after - before;
		before = after;
	}
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	qsort(samples, count, sizeof(*samples), compare);
	printf("{\"messages\": %u, \"seconds\": %.9f, \"p50_us\": %.3f, \"p99_us\": %.3f}\n", count,
	       (double)(before - began) / SECOND, (double)samples[count / 2] / 1e3,
	       (double)samples[(uint64_t)count * 99 / 100] / 1e3);
}

/* ---- arguments ------------------------------------------------------------------------------- */

static bool read_address(const char *words)
{
	char host[64];
	unsigned port;

	if (sscanf(words, "%63[0-9.]:%u", host, &port) != 2 || port > UINT16_MAX)
		return false;
	options.address.sin_family = AF_INET;
	options.address.sin_port = htons((uint16_t)port);
	return inet_pton(AF_INET, host, &options.address.sin_addr) == 1;
}

static bool read_number(const char *words, uint32_t most, uint32_t *number)
{
	char *end;
	unsigned long found = strtoul(words, &end, 10);

	*number = (uint32_t)found;
	return *end == '\0' && found > 0 && found <= most;
}

static bool read_option(const char *name, const char *value)
{
	if (strcmp(name, "--address") == 0)
		return read_address(value);
	if (strcmp(name, "--topic") == 0)
		return (options.topic = value) && strlen(value) <= 64;
	if (strcmp(name, "--seconds") == 0)
		return (options.seconds = strtod(value, NULL)) > 0;
	if (strcmp(name, "--connections") == 0)
		return read_number(value, CONNECTIONS_MAX, &options.connections);
	if (strcmp(name, "--size") == 0)
		return read_number(value, INPUT_BYTES / 2, &options.size);
	if (strcmp(name, "--batch") == 0)
		return read_number(value, 10000, &options.batch);
	if (strcmp(name, "--ready") == 0)
		return read_number(value, 2500, &options.ready);
	if (strcmp(name, "--cpus") == 0)
		return sscanf(value, "%d,%d", &options.cpus[0], &options.cpus[1]) == 2;
	return false;
}

static void usage(const char *word)
{
	fprintf(stderr,
	        "nsq_client: %s is wrong; say pub, mpub, sub, http-pub, http-mpub or roundtrip,\n"
	        "--address IPV4:PORT, --topic NAME and what the head of nsq_client.c has\n",
	        word);
	exit(1);
}

int main(int argc, char **argv)
{
	options.mode = argc > 1 ? argv[1] : "nothing";
	for (int i = 2; i < argc; i += 2) {
		if (i + 1 == argc || !read_option(argv[i], argv[i + 1]))
			usage(argv[i]);
	}
	if (options.topic == NULL || options.address.sin_port == 0)
		usage("an argument that is missing");
	for (size_t i = 0; i < sizeof(publishings) / sizeof(publishings[0]); i++) {
		if (strcmp(options.mode, publishings[i].mode) == 0)
			publishing = &publishings[i];
	}
	if (strcmp(options.mode, "roundtrip") == 0) {
		round_trips();
	} else if (strcmp(options.mode, "sub") == 0) {
		run_on(options.cpus[0]);
		run_workers(subscribe_loop);
	} else if (publishing != NULL) {
		run_on(options.cpus[0]);
		run_workers(publish_loop);
	} else {
		usage(options.mode);
	}
	return 0;
}
