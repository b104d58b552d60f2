/* A broker without files or names: memfds, one process or several (fork before attaching). */
#ifndef HARNESS_H
#define HARNESS_H

#include "base/atomics.h"
#include "base/bounds.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "base/names.h"
#include "base/process.h"
#include "base/status.h"
#include "checker.h"
#include "consume/consumer.h"
#include "disk/chunk.h"
#include "disk/prepend.h"
#include "format/record.h"
#include "instance/create.h"
#include "memory/arena.h"
#include "memory/handles.h"
#include "memory/heap.h"
#include "memory/mapping.h"
#include "memory/properties.h"
#include "memory/segment.h"
#include "publish/loan.h"
#include "publish/producer.h"
#include "publish/room.h"
#include "queue/latency.h"
#include "queue/lease.h"
#include "queue/locking.h"
#include "queue/rebuild.h"
#include "queue/session.h"
#include "queue/slots.h"
#include "queue/writer.h"
#include "shmq_supervisor.h"
#include "shmq_wire.h"
#include "sync/doorbell.h"
#include "sync/lock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef CHECK /* test_schedule has its own */
#define CHECK(condition)                                                                           \
	do {                                                                                           \
		if (!(condition)) {                                                                        \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
			abort();                                                                               \
		}                                                                                          \
	} while (0)
#define EQUAL(x, y)                                                                                \
	do {                                                                                           \
		long long x_ = (long long)(x), y_ = (long long)(y);                                        \
		if (x_ != y_) {                                                                            \
			fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__, __LINE__, #x, x_, y_);      \
			abort();                                                                               \
		}                                                                                          \
	} while (0)
#endif

#ifdef __SANITIZE_THREAD__
/* gcc 12's ThreadSanitizer does not know this function and takes what it locked for unlocked. */
#include <errno.h>
#include <sched.h>
int pthread_mutex_clocklock(pthread_mutex_t *mutex, clockid_t clock, const struct timespec *until)
{
	int r;

	while ((r = pthread_mutex_trylock(mutex)) == EBUSY) {
		if (clock_ns(clock) >= until->tv_sec * NS_PER_S + until->tv_nsec)
			return ETIMEDOUT;
		sched_yield();
	}
	return r;
}
#endif

typedef struct world {
	int directory;
	int queues[4096]; /* by serial */
	shmq_limits limits;
	shmq_broker *supervisor;
} world;

static inline int64_t soon(void)
{
	return shmq_now() + 20 * NS_PER_S;
}

static inline void world_map(world *w, shmq_broker *b)
{
	uint32_t queue;
	uint64_t serial;

	shmq_broker_missing(b, &queue, &serial);
	EQUAL(shmq_broker_map(b, queue, serial, w->queues[serial]), 0);
}

/* Evaluate a call again as long as it asks for a mapping. */
#define MAPPED(w, b, call)                                                                         \
	({                                                                                             \
		int r_;                                                                                    \
		while ((r_ = (call)) == SHMQ_NEED_MAP)                                                     \
			world_map(w, b);                                                                       \
		r_;                                                                                        \
	})

static inline shmq_limits small_limits(uint32_t mem_queue_size, uint32_t in_flight_slots)
{
	return (shmq_limits){.msg_timeout_ns = 60 * NS_PER_S,
	                     .max_msg_timeout_ns = 900 * NS_PER_S,
	                     .max_req_timeout_ns = 3600 * NS_PER_S,
	                     .max_msg_size = 1 << 20,
	                     .arena_size = 8 << 20,
	                     .node_id = 5,
	                     .mem_queue_size = mem_queue_size,
	                     .in_flight_slots = in_flight_slots};
}

static inline shmq_broker *world_attach(world *w, enum shmq_kind kind)
{
	shmq_broker *b;

	EQUAL(shmq_broker_open(w->directory, &b), 0);
	EQUAL(shmq_broker_attach(b, kind, soon()), 0);
	return b;
}

static inline world *world_start(shmq_limits limits)
{
	world *w = calloc(1, sizeof(*w));

	w->limits = limits;
	w->directory = memfd_create("directory", MFD_CLOEXEC);
	EQUAL(shmq_directory_create(w->directory, &limits,
	                            (const uint8_t *)"of a test, and nobody's secret.."),
	      0);
	w->supervisor = world_attach(w, SHMQ_AS_SUPERVISOR);
	EQUAL(shmq_supervise(w->supervisor, &limits, soon()), 0);
	return w;
}

static inline uint32_t world_topic(world *w, const char *name, uint32_t *generation)
{
	uint32_t topic;

	EQUAL(shmq_topic_create(w->supervisor, name, 0, NULL, soon(), &topic, generation), 0);
	return topic;
}

/* channel NULL: a backlog */
static inline uint32_t world_queue(world *w, uint32_t topic, const char *channel, uint64_t *serial)
{
	uint32_t queue;
	int fd = memfd_create("queue", MFD_CLOEXEC);

	EQUAL(shmq_queue_reserve(w->supervisor, soon(), &queue, serial), 0);
	w->queues[*serial] = fd;
	EQUAL(shmq_queue_create(
				  w->supervisor, fd,
				  &(shmq_queue_spec){.queue = queue,
				                     .serial = *serial,
				                     .topic = topic,
				                     .base = "t:c",
				                     .ephemeral = channel &&
				                                  shmq_name_ephemeral(channel, strlen(channel))}),
	      0);
	EQUAL(MAPPED(w, w->supervisor,
	             shmq_queue_enter(w->supervisor, queue, *serial, topic, channel, soon())),
	      0);
	EQUAL(MAPPED(w, w->supervisor, shmq_rebuild(w->supervisor, queue, soon())), 0);
	return queue;
}

static inline int world_publish(world *w, shmq_broker *b, shmq_producer *p, const char *text)
{
	shmq_body body = {text, strlen(text)};
	uint64_t id;

	return MAPPED(w, b, shmq_publish(p, &body, 1, 0, soon(), &id));
}

static inline shmq_consumer *world_consumer(world *w, shmq_broker *b, uint32_t queue,
                                            uint64_t serial, uint32_t max_in_flight)
{
	shmq_consumer *c = NULL;

	EQUAL(MAPPED(w, b, shmq_consumer_open(b, queue, serial, max_in_flight, 0, soon(), &c)), 0);
	return c;
}

static inline bool body_is(const shmq_message *m, const char *text)
{
	return m->length == strlen(text) && !memcmp(m->body, text, m->length);
}

static inline void world_leave(world *w, shmq_broker *b, shmq_producer *p, shmq_consumer *c)
{
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
	shmq_producer_close(p);
	EQUAL(MAPPED(w, b, shmq_broker_detach(b, soon())), 0);
	shmq_broker_close(b);
}

/* The bytes of a queue, as seen by the supervisor; it must be mapped already or mappable. */
static inline shmq_map *world_view(world *w, uint32_t queue)
{
	shmq_map *map;

	EQUAL(MAPPED(w, w->supervisor, map_get(w->supervisor, queue, &map)), 0);
	map_release(map); /* the broker's own reference keeps it */
	return map;
}

/* As if an unused queue had carried messages: the heads and tails of all rings are at `start`, with
 * the entries in place. */
static inline void rings_move(shmq_map *map, uint32_t start)
{
	shmq_queue_desc *q = map->q;
	uint32_t n = ld(&q->slots_committed);

	EQUAL(ring_count(&q->free_head, &q->free_tail), n);
	st(&q->ready_head, start);
	st(&q->ready_tail, start);
	st(&q->defer_head, start);
	st(&q->defer_tail, start);
	st(&q->requeue_head, start);
	st(&q->requeue_tail, start);
	st(&q->free_head, start);
	st(&q->free_tail, start + n);
	q->requeue_head_group_end = start;
	q->bodies_reclaimed_to = start + n;
	q->bodies_prepared_to = start;
	q->free_tail_cached = start + n;
	q->ready_head_cached = q->ready_tail_cached = start;
	for (uint32_t i = 0; i < n; i++)
		map->free[(start + i) & ld(&q->ring_mask)] = i;
}

/* Every queue in the directory, recounted. */
#define SOUND(w)                                                                                   \
	do {                                                                                           \
		for (uint32_t q_ = 0; q_ < ld(&(w)->supervisor->d->queues_committed); q_++) {              \
			const char *wrong_;                                                                    \
			if (ld(&(w)->supervisor->entries[q_].state) != SHMQ_ENTRY_LIVE)                        \
				continue;                                                                          \
			wrong_ = checker_queue((w)->supervisor->base, world_view((w), q_)->base);              \
			if (*wrong_) {                                                                         \
				fprintf(stderr, "%s:%d: queue %u: %s\n", __FILE__, __LINE__, q_, wrong_);          \
				abort();                                                                           \
			}                                                                                      \
		}                                                                                          \
	} while (0)

/* Reap every client whose life lock is free. */
static inline uint32_t world_reap(world *w, shmq_broker *b, uint32_t *returned)
{
	shmq_dead dead[64];
	uint32_t found, n = 0;

	EQUAL(shmq_reap_scan(b, dead, 64, &found), 0);
	*returned = 0;
	for (uint32_t i = 0; i < found; i++) {
		EQUAL(MAPPED(w, b, shmq_reap(b, dead[i].client, dead[i].generation, soon(), &n)), 0);
		*returned += n;
	}
	return found;
}

static inline void world_stop(world *w)
{
	EQUAL(MAPPED(w, w->supervisor, shmq_broker_detach(w->supervisor, soon())), 0);
	shmq_broker_close(w->supervisor);
	for (int i = 0; i < 4096; i++)
		if (w->queues[i])
			close(w->queues[i]);
	close(w->directory);
	free(w);
}

#endif
