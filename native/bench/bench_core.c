/*
 * The core's own limit: what two processes reach through shmq.h alone, with robust locks, no Python
 * and no supervisor at work beside them. tools/bench/bench.py runs it as one contestant among others.
 *
 *     bench_core one|batch|roundtrip|expire [--seconds S] [--size BYTES] [--batch N] [--memory N]
 *                [--in-flight N] [--cpus A,B]
 *
 * one, batch: a process publishes, another takes, copies the bodies to memory of its own and
 * finishes; one message at a time or N. roundtrip: a message there, another one back, both finished.
 * expire: one process has N messages in flight, the scan gives back those whose time is up first;
 * they are taken again, which is not measured.
 * --cpus: who begins runs on A only, the other one on B. --memory: mem_queue_size.
 * Prints one JSON object. Exit status 0; 1 with a sentence on stderr.
 */
#include "shmq.h"
#include "shmq_supervisor.h"

#include <errno.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define SECOND INT64_C(1000000000)
/* How long to wait for a lock, for room, for a message: beyond it something is wrong. */
#define PATIENCE (10 * SECOND)
#define CLOCK_EVERY 64 /* calls between two looks at the clock */
#define SAMPLES_MAX 4000000u

static struct options {
	const char *what;
	double seconds;
	uint32_t size, batch, memory, in_flight;
	int cpus[2]; /* -1: wherever the kernel likes */
} options = {.seconds = 1.0,
             .size = 100,
             .batch = 200,
             .memory = 100000,
             .in_flight = 1000,
             .cpus = {-1, -1}};

/* The memory that parent and children share beside the segments. */
static struct shared {
	sem_t ready, go;
	int64_t began, ended;
	uint64_t messages, waits_full, waits_empty;
	double p50_us, p99_us;
} *shared;

/* The segments' descriptors; children inherit them. */
static int directory_fd;
static struct {
	uint64_t serial;
	uint32_t index;
	int fd;
} queues[2];
static const char *const topics[2] = {"there", "back"};

static int64_t soon(void)
{
	return shmq_now() + PATIENCE;
}

static void die(const char *what, int status)
{
	fprintf(stderr, "bench_core: %s: %s (%s) %s\n", what, shmq_status_name(status),
	        shmq_status_sentence(status), shmq_error_detail());
	exit(1);
}

static void check(const char *what, int status)
{
	if (status != SHMQ_OK)
		die(what, status);
}

static void check_errno(const char *what, bool good)
{
	if (good)
		return;
	fprintf(stderr, "bench_core: %s: %s\n", what, strerror(errno));
	exit(1);
}

/* ---- the instance ---------------------------------------------------------------------------- */

static int new_segment(const char *name)
{
	int fd = memfd_create(name, 0);

	check_errno("memfd_create", fd >= 0);
	return fd;
}

static void make_queue(shmq_broker *broker, unsigned i)
{
	uint32_t topic, generation, queue;
	uint64_t serial;
	int fd = new_segment(topics[i]);

	check("topic_create",
	      shmq_topic_create(broker, topics[i], 1, NULL, soon(), &topic, &generation));
	check("queue_reserve", shmq_queue_reserve(broker, soon(), &queue, &serial));
	check("queue_create", shmq_queue_create(broker, fd,
	                                        &(shmq_queue_spec){.queue = queue,
	                                                           .serial = serial,
	                                                           .topic = topic,
	                                                           .base = topics[i]}));
	check("queue_enter", shmq_queue_enter(broker, queue, serial, topic, "bench", soon()));
	queues[i].serial = serial;
	queues[i].index = queue;
	queues[i].fd = fd;
}

static shmq_broker *make_instance(void)
{
	shmq_limits limits = {
		.msg_timeout_ns = 60 * SECOND,
		.max_msg_timeout_ns = 900 * SECOND,
		.max_req_timeout_ns = 3600 * SECOND,
		.max_msg_size = 1 << 20,
		.arena_size = (64 << 20) + 2 * (uint64_t)options.in_flight * (options.size + 128),
		.mem_queue_size = options.memory,
		.in_flight_slots = options.in_flight > 16384 ? options.in_flight : 16384,
	};
	shmq_broker *broker;

	directory_fd = new_segment("directory");
	check("directory_create", shmq_directory_create(directory_fd, &limits, NULL));
	check("broker_open", shmq_broker_open(directory_fd, &broker));
	check("broker_attach", shmq_broker_attach(broker, SHMQ_AS_SUPERVISOR, soon()));
	check("supervise", shmq_supervise(broker, &limits, soon()));
	make_queue(broker, 0);
	make_queue(broker, 1);
	return broker;
}

static shmq_broker *join_instance(void)
{
	shmq_broker *broker;

	check("broker_open", shmq_broker_open(directory_fd, &broker));
	check("broker_attach", shmq_broker_attach(broker, SHMQ_AS_CLIENT, soon()));
	return broker;
}

static void map_missing(shmq_broker *broker)
{
	uint32_t queue;
	uint64_t serial;

	shmq_broker_missing(broker, &queue, &serial);
	for (unsigned i = 0; i < 2; i++)
		if (queues[i].serial == serial)
			check("broker_map", shmq_broker_map(broker, queue, serial, queues[i].fd));
}

static shmq_producer *producer_of(shmq_broker *broker, unsigned i)
{
	uint32_t topic, generation;
	shmq_producer *producer;
	int status;

	check("topic_find", shmq_topic_find(broker, topics[i], &topic, &generation));
	while ((status = shmq_producer_open(broker, topic, generation, &producer)) == SHMQ_NEED_MAP)
		map_missing(broker);
	check("producer_open", status);
	return producer;
}

static shmq_consumer *consumer_of(shmq_broker *broker, unsigned i, uint32_t max_in_flight,
                                  int64_t msg_timeout)
{
	uint32_t topic, generation, queue;
	uint64_t serial;
	shmq_consumer *consumer;
	int status;

	check("topic_find", shmq_topic_find(broker, topics[i], &topic, &generation));
	check("queue_find", shmq_queue_find(broker, topic, "bench", &queue, &serial));
	while ((status = shmq_consumer_open(broker, queue, serial, max_in_flight, msg_timeout, soon(),
	                                    &consumer)) == SHMQ_NEED_MAP)
		map_missing(broker);
	check("consumer_open", status);
	return consumer;
}

/* ---- publish and take, with their waiting ---------------------------------------------------- */

static void publish(shmq_broker *broker, shmq_producer *producer, const shmq_body *bodies,
                    uint32_t n, int64_t until)
{
	uint64_t id;
	int status;

	while ((status = shmq_publish(producer, bodies, n, 0, until, &id)) != SHMQ_OK) {
		if (status == SHMQ_NEED_MAP) {
			map_missing(broker);
		} else if (status == SHMQ_FULL && shmq_now() < until) {
			shared->waits_full++;
			shmq_producer_wait(producer, until);
		} else {
			die("publish", status);
		}
	}
}

static uint32_t take(shmq_consumer *consumer, shmq_message *messages, uint32_t n, int64_t until)
{
	uint32_t got;
	int status;

	while ((status = shmq_take(consumer, messages, n, until, &got)) != SHMQ_OK) {
		if (status != SHMQ_EMPTY || shmq_now() >= until)
			die("take", status);
		shared->waits_empty++;
		shmq_consumer_wait(consumer, until);
	}
	return got;
}

static void be_ready(void)
{
	sem_post(&shared->ready);
	while (sem_wait(&shared->go) != 0)
		;
}

/* ---- one way --------------------------------------------------------------------------------- */

static void produce(uint32_t n)
{
	shmq_broker *broker = join_instance();
	shmq_producer *producer = producer_of(broker, 0);
	shmq_body *bodies = calloc(n, sizeof(*bodies));
	char *body = calloc(1, options.size);
	int64_t now, end;

	check_errno("calloc", bodies && body);
	memset(body, 'x', options.size);
	for (uint32_t i = 0; i < n; i++)
		bodies[i] = (shmq_body){body, options.size};
	be_ready();
	now = shared->began = shmq_now();
	end = now + (int64_t)(options.seconds * (double)SECOND);
	for (; now < end; now = shmq_now())
		for (unsigned i = 0; i < CLOCK_EVERY; i++)
			publish(broker, producer, bodies, n, now + PATIENCE);
	publish(broker, producer, &(shmq_body){"end", 3}, 1, soon());
	shmq_producer_close(producer);
	check("detach", shmq_broker_detach(broker, soon()));
}

/* Copy what was taken; true when its last one is the end. */
static bool copy(const shmq_message *messages, uint32_t got, char *into)
{
	for (uint32_t i = 0; i < got; i++, into += options.size)
		memcpy(into, messages[i].body, messages[i].length);
	return messages[got - 1].length == 3;
}

static void consume(uint32_t n)
{
	shmq_broker *broker = join_instance();
	shmq_consumer *consumer = consumer_of(broker, 0, options.batch, 0);
	shmq_message *messages = calloc(n, sizeof(*messages));
	char *bodies = calloc(n, options.size);
	uint64_t count = 0;
	int64_t until = soon();

	check_errno("calloc", messages && bodies);
	be_ready();
	for (bool end = false; !end;) {
		uint32_t got = take(consumer, messages, n, until);

		end = copy(messages, got, bodies);
		check("finish", shmq_finish(consumer, messages, got, NULL, until));
		count += got;
		if (count % CLOCK_EVERY < got)
			until = soon();
	}
	shared->ended = shmq_now();
	shared->messages = count - 1;
	check("close", shmq_consumer_close(consumer, soon()));
	check("detach", shmq_broker_detach(broker, soon()));
}

/* ---- there and back -------------------------------------------------------------------------- */

static uint32_t take_one(shmq_consumer *consumer, char *into)
{
	shmq_message message;
	int64_t until = soon();

	take(consumer, &message, 1, until);
	memcpy(into, message.body, message.length);
	check("finish", shmq_finish(consumer, &message, 1, NULL, until));
	return message.length;
}

static int ascending(const void *a, const void *b)
{
	float x = *(const float *)a, y = *(const float *)b;

	return (x > y) - (x < y);
}

static void call(uint32_t unused)
{
	shmq_broker *broker = join_instance();
	shmq_producer *producer = producer_of(broker, 0);
	shmq_consumer *consumer = consumer_of(broker, 1, options.batch, 0);
	float *samples = malloc(SAMPLES_MAX * sizeof(*samples));
	char *body = calloc(1, options.size);
	uint32_t n = 0;
	int64_t end;

	(void)unused;
	check_errno("malloc", samples && body);
	be_ready();
	shared->began = shmq_now();
	end = shared->began + (int64_t)(options.seconds * (double)SECOND);
	for (int64_t from = shared->began; from < end && n < SAMPLES_MAX;) {
		int64_t to;

		publish(broker, producer, &(shmq_body){body, options.size}, 1, soon());
		take_one(consumer, body);
		to = shmq_now();
		samples[n++] = (float)(to - from) / 1000.0f;
		from = to;
	}
	shared->ended = shmq_now();
	publish(broker, producer, &(shmq_body){"end", 3}, 1, soon());
	qsort(samples, n, sizeof(*samples), ascending);
	shared->messages = n;
	shared->p50_us = (double)samples[n / 2];
	shared->p99_us = (double)samples[(uint64_t)n * 99 / 100];
	check("close", shmq_consumer_close(consumer, soon()));
	check("detach", shmq_broker_detach(broker, soon()));
}

static void answer(uint32_t unused)
{
	shmq_broker *broker = join_instance();
	shmq_consumer *consumer = consumer_of(broker, 0, options.batch, 0);
	shmq_producer *producer = producer_of(broker, 1);
	char *body = calloc(1, options.size);

	(void)unused;
	check_errno("calloc", body != NULL);
	be_ready();
	while (take_one(consumer, body) != 3)
		publish(broker, producer, &(shmq_body){body, options.size}, 1, soon());
	check("close", shmq_consumer_close(consumer, soon()));
	check("detach", shmq_broker_detach(broker, soon()));
}

/* ---- timeouts --------------------------------------------------------------------------------- */

#define BITE 256u    /* as the supervisor's scan */
#define TIMEOUTS 16u /* different ones, so that deadlines do not come in the order of taking */

static void take_again(shmq_consumer *consumer, uint32_t n)
{
	shmq_message messages[BITE];

	for (uint32_t got; n; n -= got)
		got = take(consumer, messages, n, soon());
}

static void expire(shmq_broker *broker)
{
	shmq_producer *producer = producer_of(broker, 0);
	shmq_consumer *consumers[TIMEOUTS];
	shmq_body bodies[BITE];
	shmq_expiry step = {.now = INT64_MAX - 1, .limit = BITE};
	char *body = calloc(1, options.size);
	int64_t end, spent = 0;
	uint32_t expired, due, turn = 0;

	check_errno("calloc", body != NULL);
	for (uint32_t i = 0; i < BITE; i++)
		bodies[i] = (shmq_body){body, options.size};
	for (uint32_t i = 0; i < TIMEOUTS; i++)
		consumers[i] = consumer_of(broker, 0, UINT32_MAX, 60 * SECOND + (int64_t)i * SECOND / 100);
	for (uint32_t left = options.in_flight, n; left; left -= n) {
		n = left < BITE ? left : BITE;
		publish(broker, producer, bodies, n, soon());
		take_again(consumers[turn++ % TIMEOUTS], n);
	}
	end = shmq_now() + (int64_t)(options.seconds * (double)SECOND);
	for (int64_t from, to = 0; to < end; spent += to - from) {
		from = shmq_now();
		step.realtime = shmq_realtime();
		check("expire", shmq_expire(broker, queues[0].index, &step, soon(), &expired, &due));
		to = shmq_now();
		shared->messages += expired;
		take_again(consumers[turn++ % TIMEOUTS], expired);
	}
	shared->ended = shared->began + spent;
	for (uint32_t i = 0; i < TIMEOUTS; i++)
		shmq_consumer_free(consumers[i]);
	shmq_producer_close(producer);
	free(body);
}

/* ---- main ------------------------------------------------------------------------------------ */

static void stay_on(int cpu)
{
	cpu_set_t set;

	if (cpu < 0)
		return;
	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	check_errno("sched_setaffinity", sched_setaffinity(0, sizeof(set), &set) == 0);
}

static pid_t start(void (*role)(uint32_t), uint32_t n, int cpu)
{
	pid_t pid = fork();

	check_errno("fork", pid >= 0);
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		stay_on(cpu);
		role(n);
		exit(0);
	}
	return pid;
}

/* Wait for both; when one failed, end the other, which would wait for it. */
static void join(pid_t a, pid_t b)
{
	for (int i = 0; i < 2; i++) {
		int status;

		check_errno("wait", wait(&status) > 0);
		if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
			continue;
		kill(a, SIGKILL);
		kill(b, SIGKILL);
		exit(1);
	}
}

static void run(void (*first)(uint32_t), void (*second)(uint32_t), uint32_t n)
{
	pid_t a = start(second, n, options.cpus[1]), b = start(first, n, options.cpus[0]);

	for (int i = 0; i < 2; i++)
		while (sem_wait(&shared->ready) != 0)
			;
	sem_post(&shared->go);
	sem_post(&shared->go);
	join(a, b);
}

static void usage(void)
{
	fputs("usage: bench_core one|batch|roundtrip|expire [--seconds S] [--size BYTES] [--batch N] "
	      "[--memory N] [--in-flight N] [--cpus A,B]\n",
	      stderr);
	exit(2);
}

static void parse(int argc, char **argv)
{
	if (argc < 2 || argc % 2 != 0)
		usage();
	options.what = argv[1];
	for (int i = 2; i < argc; i += 2) {
		double value = strtod(argv[i + 1], NULL);

		if (strcmp(argv[i], "--cpus") == 0) {
			if (sscanf(argv[i + 1], "%d,%d", &options.cpus[0], &options.cpus[1]) != 2)
				usage();
			continue;
		}
		if (!(value > 0 && value < 1e9))
			usage();
		if (strcmp(argv[i], "--seconds") == 0)
			options.seconds = value;
		else if (strcmp(argv[i], "--size") == 0 && value > 3)
			options.size = (uint32_t)value;
		else if (strcmp(argv[i], "--batch") == 0)
			options.batch = (uint32_t)value;
		else if (strcmp(argv[i], "--memory") == 0)
			options.memory = (uint32_t)value;
		else if (strcmp(argv[i], "--in-flight") == 0)
			options.in_flight = (uint32_t)value;
		else
			usage();
	}
}

int main(int argc, char **argv)
{
	shmq_broker *broker;
	double seconds;

	parse(argc, argv);
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	check_errno("mmap", shared != MAP_FAILED);
	sem_init(&shared->ready, 1, 0);
	sem_init(&shared->go, 1, 0);
	broker = make_instance();
	if (strcmp(options.what, "one") == 0)
		run(produce, consume, 1);
	else if (strcmp(options.what, "batch") == 0)
		run(produce, consume, options.batch);
	else if (strcmp(options.what, "roundtrip") == 0)
		run(call, answer, 1);
	else if (strcmp(options.what, "expire") == 0)
		expire(broker);
	else
		usage();
	check("detach", shmq_broker_detach(broker, soon()));
	shmq_broker_close(broker);
	seconds = (double)(shared->ended - shared->began) / (double)SECOND;
	printf("{\"messages\": %llu, \"seconds\": %.6f, \"p50_us\": %.3f, \"p99_us\": %.3f, "
	       "\"waits_full\": %llu, \"waits_empty\": %llu}\n",
	       (unsigned long long)shared->messages, seconds, shared->p50_us, shared->p99_us,
	       (unsigned long long)shared->waits_full, (unsigned long long)shared->waits_empty);
	return 0;
}
