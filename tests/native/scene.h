/*
 * A broker to scribble in: a topic with two channels and one topic beside it, with messages in
 * every state, and a program of calls that uses all of it. The bytes of its segments can be put
 * back, so that thousands of cases need one scene.
 *
 * Its mappings stand alone between inaccessible areas: an access beyond one is a fault, and never
 * meets another mapping by chance.
 */
#ifndef SCENE_H
#define SCENE_H

#include "harness.h"

#include <sys/stat.h>
#include <sys/syscall.h>

#ifndef __SANITIZE_THREAD__
#define SCENE_GUARD                                                                                \
	(UINT64_C(1) << 40) /* more than 2^32 slots of 128 bytes   \
                                         */

static struct scene_view {
	char *at;
	size_t length;
	ino_t file;
	bool used;
} scene_views[64];
/* One in this number of unmappings is done: to map and to touch again takes longer than a case. */
static uint32_t scene_unmaps_every = 1;

static bool scene_view_is(const struct scene_view *view, ino_t file, size_t length)
{
	return view->at && !view->used && view->file == file && view->length == length;
}

static void scene_view_drop(struct scene_view *view)
{
	if (view->at)
		syscall(SYS_munmap, view->at - SCENE_GUARD, view->length + 2 * SCENE_GUARD);
	view->at = NULL;
}

void *mmap(void *at, size_t length, int protection, int flags, int fd, off_t offset)
{
	struct scene_view *view = NULL;
	struct stat stat;
	char *all;

	if (!(flags & MAP_SHARED) || fd < 0 || fstat(fd, &stat))
		return (void *)syscall(SYS_mmap, at, length, protection, flags, fd, offset);
	for (int i = 0; i < 64; i++) {
		if (scene_view_is(&scene_views[i], stat.st_ino, length)) {
			scene_views[i].used = true;
			return scene_views[i].at;
		}
		if (!scene_views[i].used)
			view = &scene_views[i];
	}
	if (!view)
		abort();
	scene_view_drop(view);
	all = (char *)syscall(SYS_mmap, NULL, length + 2 * SCENE_GUARD, PROT_NONE,
	                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (all == MAP_FAILED)
		return MAP_FAILED;
	*view = (struct scene_view){all + SCENE_GUARD, length, stat.st_ino, true};
	return (void *)syscall(SYS_mmap, view->at, length, protection, flags | MAP_FIXED, fd, offset);
}

int munmap(void *at, size_t length)
{
	static uint32_t unmapped;

	for (int i = 0; i < 64; i++)
		if (at && scene_views[i].at == at) {
			scene_views[i].used = false;
			if (unmapped++ % scene_unmaps_every == 0)
				scene_view_drop(&scene_views[i]);
			return 0;
		}
	return (int)syscall(SYS_munmap, at, length);
}
#endif

enum { SCENE_QUEUES = 3, SCENE_MESSAGES = 40 }; /* published to the topic that is scribbled in */

typedef struct scene {
	world *w;
	shmq_broker *b; /* the client */
	uint32_t topic, generation, beside, beside_generation;
	uint32_t queue[SCENE_QUEUES]; /* channels c and d of the topic, o of the one beside */
	uint64_t serial[SCENE_QUEUES];
	shmq_map *map[SCENE_QUEUES];
	shmq_producer *p, *beside_p, *borrower;
	shmq_consumer *c, *d, *o;
	shmq_loan *loan; /* stays open */
	shmq_lease_holder holder;
	shmq_lease lease; /* stays held */
	shmq_message pinned;
	int64_t monotonic, realtime;
	struct scene_part {
		uint8_t *at, *copy;
		uint64_t bytes;
	} parts[80];
	uint32_t parts_count;
} scene;

static inline void scene_part_add(scene *s, void *at, uint64_t bytes)
{
	struct scene_part *part = &s->parts[s->parts_count++];

	part->at = at;
	part->bytes = bytes;
	part->copy = malloc(bytes);
	memcpy(part->copy, at, bytes);
}

/* Everything that is written to by what `scene_use` calls. */
static inline void scene_remember(scene *s)
{
	shmq_broker *b = s->w->supervisor;

	scene_part_add(s, b->d, sizeof(*b->d));
	scene_part_add(s, b->clients, 3 * sizeof(*b->clients));
	scene_part_add(s, b->waiters, 8 * sizeof(*b->waiters));
	scene_part_add(s, b->requests, 2 * sizeof(*b->requests));
	scene_part_add(s, b->topics, 4 * sizeof(*b->topics));
	scene_part_add(s, b->entries, 4 * sizeof(*b->entries));
	scene_part_add(s, b->next_deadline, 4 * sizeof(int64_t));
	scene_part_add(s, b->next_due, 4 * sizeof(int64_t));
	scene_part_add(s, b->writers, 4 * sizeof(*b->writers));
	for (int i = 0; i < SCENE_QUEUES; i++) {
		shmq_map *m = s->map[i];
		uint32_t n = m->slots_max, ring = (ld(&m->rings_backed) + 1) * 4;

		EQUAL(ld(&m->q->slots_committed), n);
		scene_part_add(s, m->q, sizeof(*m->q));
		scene_part_add(s, m->slots, n * sizeof(*m->slots));
		scene_part_add(s, m->ready, ring);
		scene_part_add(s, m->defer, ring);
		scene_part_add(s, m->requeue, ring);
		scene_part_add(s, m->free, ring);
		scene_part_add(s, m->in_flight.when, n * 8);
		scene_part_add(s, m->in_flight.slot, n * 4);
		scene_part_add(s, m->deferred.when, n * 8);
		scene_part_add(s, m->deferred.slot, n * 4);
		scene_part_add(s, m->sessions, 8 * sizeof(*m->sessions));
		if (ld(&m->q->leases_committed)) {
			scene_part_add(s, m->leases, SHMQ_LEASES * sizeof(*m->leases));
			scene_part_add(s, m->lease_holders, 4 * sizeof(*m->lease_holders));
		}
		scene_part_add(s, m->arena, m->arena_max);
	}
}

/* The producer is a new one: it knows its topic's queues by a version that garbage may have had
 * too. */
static inline void scene_restore(scene *s)
{
	for (uint32_t i = 0; i < s->parts_count; i++)
		memcpy(s->parts[i].at, s->parts[i].copy, s->parts[i].bytes);
	shmq_producer_close(s->p);
	EQUAL(shmq_producer_open(s->b, s->topic, s->generation, &s->p), 0);
}

/* The k-th message says its number. */
static inline uint64_t scene_body(char *text, int k)
{
	return (uint64_t)sprintf(text, "message %d%*s", k, 40 * (k % 7), "");
}

static inline int scene_number(const shmq_message *m)
{
	char text[16] = "";
	int k;

	memcpy(text, m->body, m->length < 15 ? m->length : 15);
	return sscanf(text, "message %d", &k) == 1 ? k : -1;
}

static inline void scene_fill(scene *s, shmq_producer *p, int64_t due, int from, int to)
{
	char text[400];

	for (int k = from; k < to; k++) {
		shmq_body body = {text, scene_body(text, k)};
		uint64_t id;

		EQUAL(MAPPED(s->w, s->b, shmq_publish(p, &body, 1, due, soon(), &id)), 0);
	}
}

static inline shmq_limits scene_limits(void)
{
	shmq_limits limits = small_limits(64, 32);

	limits.arena_size = 32 << 10;
	limits.max_msg_size = 20000;
	return limits;
}

/* All slots and bytes there can be are committed, so that what is put back is everything. */
static inline void scene_grow(scene *s, int i)
{
	shmq_map *m = s->map[i];

	EQUAL(both_lock(s->w->supervisor, m, soon()), 0);
	EQUAL(queue_commit_slots(m, m->slots_max), 0);
	EQUAL(segment_commit(m->base, (uint64_t)(m->arena - m->base), m->arena_max), 0);
	st(&m->q->slots_committed, m->slots_max);
	st(&m->q->arena_committed, m->arena_max);
	EQUAL(queue_rebuild(s->w->supervisor, m, false), 0);
	both_unlock(s->w->supervisor, m);
}

static inline scene *scene_make(void)
{
	scene *s = calloc(1, sizeof(*s));
	shmq_message m[16];
	uint32_t got, expired, due, bell;
	world *w;

	s->w = w = world_start(scene_limits());
	s->topic = world_topic(w, "t", &s->generation);
	s->beside = world_topic(w, "beside", &s->beside_generation);
	s->queue[0] = world_queue(w, s->topic, "c", &s->serial[0]);
	s->queue[1] = world_queue(w, s->topic, "d", &s->serial[1]);
	s->queue[2] = world_queue(w, s->beside, "o", &s->serial[2]);
	s->b = world_attach(w, SHMQ_AS_CLIENT);
	for (int i = 0; i < SCENE_QUEUES; i++) {
		s->map[i] = world_view(w, s->queue[i]);
		scene_grow(s, i);
	}
	EQUAL(shmq_producer_open(s->b, s->topic, s->generation, &s->p), 0);
	EQUAL(shmq_producer_open(s->b, s->topic, s->generation, &s->borrower), 0);
	EQUAL(shmq_producer_open(s->b, s->beside, s->beside_generation, &s->beside_p), 0);
	s->c = world_consumer(w, s->b, s->queue[0], s->serial[0], 100);
	s->d = world_consumer(w, s->b, s->queue[1], s->serial[1], 100);
	s->o = world_consumer(w, s->b, s->queue[2], s->serial[2], 100);
	s->realtime = shmq_realtime() + 1000 * NS_PER_S;
	scene_fill(s, s->p, 0, 0, SCENE_MESSAGES - 4);
	scene_fill(s, s->p, s->realtime, SCENE_MESSAGES - 4, SCENE_MESSAGES);
	scene_fill(s, s->beside_p, 0, 0, 10);
	/* in channel c: 0 finished and pinned, 1 to 3 back, 4 put off, 5 to 7 in flight */
	EQUAL(shmq_take(s->c, m, 8, soon(), &got), 0);
	EQUAL(got, 8);
	s->pinned = m[0];
	EQUAL(shmq_pin(s->c, m, soon()), 0);
	EQUAL(shmq_finish(s->c, m, 1, NULL, soon()), 0);
	EQUAL(shmq_requeue(s->c, m + 1, 3, 0, NULL, soon()), 0);
	EQUAL(shmq_requeue(s->c, m + 4, 1, 900 * NS_PER_S, NULL, soon()), 0);
	EQUAL(shmq_expire(w->supervisor, s->queue[0], &(shmq_expiry){.limit = 10}, soon(), &expired,
	                  &due),
	      0);
	scene_fill(s, s->p, s->realtime, SCENE_MESSAGES, SCENE_MESSAGES + 1); /* in the defer ring */
	EQUAL(shmq_loan_begin(s->borrower, 500, soon(), &s->loan), 0);
	memset(shmq_loan_data(s->loan), 0x6c, 500);
	EQUAL(MAPPED(s->w, s->b,
	             shmq_lease_holder_open(s->b, s->queue[0], s->serial[0],
	                                    &(shmq_lease_settings){.name = "reader"}, soon(),
	                                    &s->holder)),
	      0);
	EQUAL(shmq_lease_take(s->b, &s->holder,
	                      &(shmq_lease_wish){.max_bytes = UINT64_MAX, .n = 4, .parts = 2}, soon(),
	                      &s->lease),
	      0);
	EQUAL(s->lease.count, 4);
	s->monotonic = shmq_now() + 10000 * NS_PER_S;
	s->realtime += 10000 * NS_PER_S;
	EQUAL(bell_get(s->b, &bell), 0); /* both processes' tables of bells are as they will be */
	bell_put(s->b, bell);
	SOUND(w);
	scene_remember(s);
	return s;
}

#endif
