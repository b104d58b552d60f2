/* A world of one queue, with a client that publishes to it and consumes from it. */
#ifndef ONE_QUEUE_H
#define ONE_QUEUE_H

#include "harness.h"

typedef struct stage {
	world *w;
	shmq_broker *b, *s; /* the client's, the supervisor's */
	uint32_t topic, generation, queue;
	uint64_t serial;
	shmq_producer *p;
	shmq_consumer *c;
	shmq_queue_desc *q;
} stage;

static inline stage stage_open(shmq_limits limits, const char *channel)
{
	stage x = {.w = world_start(limits)};

	x.s = x.w->supervisor;
	x.topic = world_topic(x.w, "t", &x.generation);
	x.queue = world_queue(x.w, x.topic, channel, &x.serial);
	x.b = world_attach(x.w, SHMQ_AS_CLIENT);
	EQUAL(shmq_producer_open(x.b, x.topic, x.generation, &x.p), 0);
	x.c = world_consumer(x.w, x.b, x.queue, x.serial, 1000000);
	x.q = world_view(x.w, x.queue)->q;
	return x;
}

static inline void stage_close(stage x)
{
	SOUND(x.w);
	world_leave(x.w, x.b, x.p, x.c);
	world_stop(x.w);
}

#endif
