/*
 * The counterexamples behind the rules of docs/model/README.md are staged: by calls in the fatal
 * order, by half-done states written to the shared bytes, by processes that stop or die while they
 * hold locks. This is the stage; test_counterexamples_*.c are the tests.
 */
#ifndef COUNTEREXAMPLE_H
#define COUNTEREXAMPLE_H

#include "harness.h"

#include <signal.h>

typedef struct stage {
	world *w;
	shmq_broker *b, *s;
	uint32_t topic, generation, queue;
	uint64_t serial;
	shmq_producer *p;
	shmq_consumer *c;
	shmq_map *map;
	shmq_queue_desc *q;
	uint32_t slots[300], lengths[300];
	uint64_t positions[300], at;
	shmq_spill spill;
	uint8_t disk[1 << 16];
} stage;

static inline stage *setup(void)
{
	stage *x = calloc(1, sizeof(*x));

	x->w = world_start(small_limits(300, 100));
	x->s = x->w->supervisor;
	x->topic = world_topic(x->w, "t", &x->generation);
	x->queue = world_queue(x->w, x->topic, "c", &x->serial);
	x->b = world_attach(x->w, SHMQ_AS_CLIENT);
	EQUAL(shmq_producer_open(x->b, x->topic, x->generation, &x->p), 0);
	x->c = world_consumer(x->w, x->b, x->queue, x->serial, 1000);
	x->map = world_view(x->w, x->queue);
	x->q = x->map->q;
	x->spill = (shmq_spill){.slots = x->slots, .lengths = x->lengths, .positions = x->positions};
	return x;
}

static inline void teardown(stage *x)
{
	SOUND(x->w);
	world_leave(x->w, x->b, x->p, x->c);
	world_stop(x->w);
	free(x);
}

static inline void publish(stage *x, const char *letters)
{
	char text[2] = {0};

	for (; *letters; letters++) {
		text[0] = *letters;
		EQUAL(world_publish(x->w, x->b, x->p, text), 0);
	}
}

static inline shmq_message take(stage *x)
{
	shmq_message m;
	uint32_t got;

	EQUAL(shmq_take(x->c, &m, 1, soon(), &got), 0);
	return m;
}

static inline void nothing_to_take(stage *x)
{
	shmq_message m;
	uint32_t got;

	EQUAL(shmq_take(x->c, &m, 1, soon(), &got), SHMQ_EMPTY);
}

static inline void expect(stage *x, const char *letters)
{
	char text[2] = {0};

	for (; *letters; letters++) {
		shmq_message m = take(x);

		text[0] = *letters;
		if (!body_is(&m, text))
			fprintf(stderr, "%.1s, not %s\n", (const char *)m.body, text);
		CHECK(body_is(&m, text));
		EQUAL(shmq_finish(x->c, &m, 1, NULL, soon()), 0);
	}
}

static inline void begin_spill(stage *x, uint32_t n, enum shmq_spill_source from)
{
	uint64_t at = x->at;

	EQUAL(shmq_spill_begin(x->s, x->queue, from, n, 1 << 14, soon(), &x->spill), 0);
	EQUAL(shmq_spill_encode(x->s, &x->spill, x->disk + at), 0);
	for (uint32_t i = 0; i < x->spill.count; at += x->lengths[i++])
		x->positions[i] = at;
}

static inline void end_spill(stage *x)
{
	EQUAL(shmq_spill_end(x->s, &x->spill, x->at + x->spill.bytes, true, soon()), 0);
	x->at += x->spill.bytes;
}

static inline void restore_all(stage *x)
{
	uint64_t from = ld(&x->q->disk_read), used;
	uint32_t taken;

	EQUAL(shmq_restore(x->s, x->queue,
	                   &(shmq_records){.data = x->disk + from,
	                                   .length = x->at - from,
	                                   .position = from,
	                                   .next_position = x->at},
	                   soon(), &taken, &used),
	      0);
	EQUAL(used, x->at - from);
}

static inline void rebuild(stage *x)
{
	EQUAL(shmq_rebuild(x->s, x->queue, soon()), 0);
}

/* A child that does `what` with handles of its own and is then killed. */
static inline void a_death(stage *x, void (*what)(stage *))
{
	pid_t pid = fork();
	int status;

	if (!pid) {
		x->b = world_attach(x->w, SHMQ_AS_CLIENT);
		x->c = world_consumer(x->w, x->b, x->queue, x->serial, 1000);
		x->map = ld(&x->b->maps[x->queue]);
		EQUAL(shmq_producer_open(x->b, x->topic, x->generation, &x->p), 0);
		what(x);
		raise(SIGKILL);
	}
	EQUAL(waitpid(pid, &status, 0), pid);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static inline void hold_the_deliver_lock(stage *x)
{
	EQUAL(lock_take(&x->map->q->deliver, 0), 0);
}

static inline pid_t stopped(stage *x, bool publish_lock)
{
	pid_t pid = fork();
	int status;

	if (!pid) {
		shmq_broker *b = world_attach(x->w, SHMQ_AS_CLIENT);
		shmq_lock_desc *lock;

		EQUAL(shmq_broker_map(b, x->queue, x->serial, x->w->queues[x->serial]), 0);
		lock = publish_lock ? &b->topics[x->topic].publish : &ld(&b->maps[x->queue])->q->deliver;
		EQUAL(lock_take(lock, 0), 0);
		raise(SIGSTOP);
		lock_drop(lock);
		EQUAL(shmq_broker_detach(b, soon()), 0);
		_exit(0);
	}
	EQUAL(waitpid(pid, &status, WUNTRACED), pid);
	CHECK(WIFSTOPPED(status));
	return pid;
}

static inline void go_on(pid_t pid)
{
	int status;

	EQUAL(kill(pid, SIGCONT), 0);
	EQUAL(waitpid(pid, &status, 0), pid);
	CHECK(WIFEXITED(status) && !WEXITSTATUS(status));
}

#endif
