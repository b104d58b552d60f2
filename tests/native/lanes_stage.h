/* A client with four queues of different topics, and one consumer of them. */
#ifndef LANES_STAGE_H
#define LANES_STAGE_H

#include "harness.h"

#define LANES 4u

typedef struct stage {
	world *w;
	shmq_broker *b;
	uint32_t topic[LANES], generation[LANES], queue[LANES];
	uint64_t serial[LANES];
	shmq_producer *p[LANES];
	shmq_consumer *c[LANES];
	shmq_map *map[LANES];
	shmq_lanes *l;
} stage;

static inline stage setup(void)
{
	static const char *const names[] = {"a", "b", "c", "d"};
	stage x = {.w = world_start(small_limits(1000, 1000))};

	x.b = world_attach(x.w, SHMQ_AS_CLIENT);
	for (uint32_t i = 0; i < LANES; i++) {
		x.topic[i] = world_topic(x.w, names[i], &x.generation[i]);
		x.queue[i] = world_queue(x.w, x.topic[i], "c", &x.serial[i]);
		x.map[i] = world_view(x.w, x.queue[i]);
		EQUAL(shmq_producer_open(x.b, x.topic[i], x.generation[i], &x.p[i]), 0);
		x.c[i] = world_consumer(x.w, x.b, x.queue[i], x.serial[i], 100);
	}
	return x;
}

/* level: of each of the n lanes */
static inline void open_lanes(stage *x, bool strict, const uint32_t *weights, uint32_t levels,
                              uint32_t max_in_flight, const uint32_t *level, uint32_t n)
{
	EQUAL(shmq_lanes_open(x->b, strict, false, weights, levels, max_in_flight, &x->l), 0);
	for (uint32_t i = 0; i < n; i++)
		EQUAL(shmq_lanes_add(x->l, x->c[i], level[i], &x->c[i]), 0);
}

static inline void close_lanes(stage *x)
{
	shmq_lanes_close(x->l);
	for (uint32_t i = 0; i < LANES; i++)
		EQUAL(ld(&x->map[i]->q->takers.summary), 0);
	shmq_lanes_free(x->l);
}

static inline void teardown(stage x)
{
	SOUND(x.w);
	for (uint32_t i = 0; i < LANES; i++) {
		EQUAL(shmq_consumer_close(x.c[i], soon()), 0);
		shmq_consumer_free(x.c[i]);
		shmq_producer_close(x.p[i]);
	}
	EQUAL(MAPPED(x.w, x.b, shmq_broker_detach(x.b, soon())), 0);
	shmq_broker_close(x.b);
	world_stop(x.w);
}

static inline void publish(stage *x, uint32_t lane, uint32_t n)
{
	while (n--)
		EQUAL(world_publish(x->w, x->b, x->p[lane], "x"), 0);
}

/* The lane it took from, or LANES: there was nothing. Its messages are finished. */
static inline uint32_t take(stage *x, uint32_t n, uint32_t *got)
{
	shmq_message m[16];
	shmq_consumer **from;
	void *tag;
	int r = shmq_lanes_take(x->l, m, n, soon(), got, &tag);

	if (r == SHMQ_EMPTY)
		return LANES;
	EQUAL(r, 0);
	from = tag;
	EQUAL(shmq_finish(*from, m, *got, NULL, soon()), 0);
	return (uint32_t)(from - x->c);
}

/* The lanes of the next takes are those of the text: "abca". */
static inline void takes(stage *x, const char *lanes)
{
	uint32_t got;

	for (; *lanes; lanes++) {
		EQUAL(take(x, 1, &got), *lanes - 'a');
		EQUAL(got, 1);
	}
}

static inline bool rung(stage *x, uint32_t bell)
{
	return !sem_trywait(&x->b->waiters[bell].bell);
}

static inline bool announced(stage *x, uint32_t lane, uint32_t bell)
{
	return wait_is_announced(&x->map[lane]->q->takers, bell);
}

static inline uint32_t bell_of(stage *x)
{
	for (uint32_t i = 0; i < SHMQ_WAITERS; i++)
		if (ld(&x->b->waiters[i].turn))
			return i;
	return SHMQ_NONE;
}

#endif
