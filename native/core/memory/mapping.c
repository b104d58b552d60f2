/*
 * One process's mappings: the directory, its table of mapped queues, and the views that it hands to
 * Python. After a fork all of them belong to the parent; the child opens its own.
 */
#include "memory/mapping.h"

#include "base/atomics.h"
#include "base/bounds.h"
#include "base/libc.h"
#include "base/status.h"
#include "memory/handles.h"
#include "memory/heap.h"
#include "memory/segment.h"
#include "shmq.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

_Atomic uint32_t fork_count;

static void in_child(void)
{
	atomic_fetch_add(&fork_count, 1);
}

__attribute__((constructor)) static void watch_forks(void)
{
	pthread_atfork(NULL, NULL, in_child);
}

uint32_t shmq_fork_generation(void)
{
	return ld(&fork_count);
}

bool shmq_broker_forked(const shmq_broker *b)
{
	return b->fork_generation != ld(&fork_count);
}

bool usable(const shmq_broker *b)
{
	return b->attached && !shmq_broker_forked(b);
}

int usable_status(const shmq_broker *b)
{
	return shmq_broker_forked(b) ? SHMQ_FORKED : b->attached ? 0 : SHMQ_CLOSED;
}

uint32_t shmq_broker_client(const shmq_broker *b)
{
	return b->client;
}

void broker_hold(shmq_broker *b)
{
	atomic_fetch_add(&b->references, 1);
}

void broker_release(shmq_broker *b)
{
	if (atomic_fetch_sub(&b->references, 1) != 1)
		return;
	for (uint32_t i = 0; i < SHMQ_QUEUES; i++)
		if (ld(&b->maps[i]))
			map_release(ld(&b->maps[i]));
	/* glibc and musl link the robust mutexes that a thread holds through the mutexes themselves. If the
	 * thread that attached lives and still holds `life`, its next robust lock writes into this
	 * mapping, so the mapping has to outlive the broker. */
	if (!b->life || shmq_broker_forked(b) || !thread_lives(b->life_tid))
		segment_unmap(b->base, b->size);
	pthread_mutex_destroy(&b->mutex);
	free(b);
}

void shmq_broker_close(shmq_broker *b)
{
	b->attached = false;
	broker_release(b);
}

static _Thread_local struct {
	uint32_t queue;
	uint64_t serial;
} missing;

void shmq_broker_missing(const shmq_broker *b, uint32_t *queue, uint64_t *serial)
{
	(void)b;
	*queue = missing.queue;
	*serial = missing.serial;
}

int map_get_serial(shmq_broker *b, uint32_t index, uint64_t serial, shmq_map **out)
{
	shmq_map *map;
	int r = 0;

	if (index >= SHMQ_QUEUES)
		return SHMQ_INVALID;
	pthread_mutex_lock(&b->mutex);
	map = ld(&b->maps[index]); /* SYNC(map) */
	if (map && map->serial == serial) {
		map_hold(map);
		*out = map;
	} else {
		missing.queue = index;
		missing.serial = serial;
		r = SHMQ_NEED_MAP;
	}
	pthread_mutex_unlock(&b->mutex);
	return r;
}

int map_get(shmq_broker *b, uint32_t index, shmq_map **out)
{
	/* SYNC(entry-state) */
	if (index >= queues_of(b) || ld_acquire(&b->entries[index].state) == SHMQ_ENTRY_FREE)
		return SHMQ_GONE;
	return map_get_serial(b, index, b->entries[index].serial, out);
}

int shmq_broker_map(shmq_broker *b, uint32_t queue, uint64_t serial, int fd)
{
	shmq_map *map, *old;
	int r;

	if (queue >= SHMQ_QUEUES)
		return SHMQ_INVALID;
	r = map_open(fd, queue, serial, b->d->segment.instance, &map);
	if (r)
		return r;
	pthread_mutex_lock(&b->mutex);
	old = ld(&b->maps[queue]);
	st_release(&b->maps[queue], map); /* SYNC(map) */
	pthread_mutex_unlock(&b->mutex);
	map_release(old);
	return 0;
}

void shmq_broker_unmap(shmq_broker *b, uint32_t queue, uint64_t serial)
{
	shmq_map *old = NULL;

	if (queue >= SHMQ_QUEUES)
		return;
	pthread_mutex_lock(&b->mutex);
	if (ld(&b->maps[queue]) && ld(&b->maps[queue])->serial == serial) {
		old = ld(&b->maps[queue]);
		st_release(&b->maps[queue], (shmq_map *)NULL); /* SYNC(map) */
	}
	pthread_mutex_unlock(&b->mutex);
	map_release(old);
}

void map_put(shmq_broker *b, shmq_map *map)
{
	if (map && ld(&map->q->segment.ready) == SHMQ_CLOSED_STATE && !shmq_broker_forked(b))
		shmq_broker_unmap(b, map->index, map->serial);
	map_release(map);
}

void client_note_queue(shmq_broker *b, uint32_t index)
{
	_Atomic uint64_t *word = &b->clients[b->client].touched[index / 64];
	uint64_t bit = UINT64_C(1) << index % 64;

	if (!(ld(word) & bit))
		atomic_fetch_or(word, bit);
}

struct view {
	shmq_broker *broker;
	shmq_map *map;
};

int shmq_segment_view(shmq_broker *b, uint32_t queue, const void **base, uint64_t *length,
                      void **reference)
{
	struct view *v = calloc(1, sizeof(*v));
	int r = v ? 0 : SHMQ_NO_MEMORY;

	if (!r && queue != SHMQ_AS_DIRECTORY)
		r = map_get(b, queue, &v->map);
	if (r) {
		free(v);
		return r;
	}
	broker_hold(b);
	v->broker = b;
	*base = v->map ? v->map->base : b->base;
	*length = v->map ? v->map->size : b->size;
	*reference = v;
	return 0;
}

void shmq_segment_release(void *reference)
{
	struct view *v = reference;

	map_release(v->map);
	broker_release(v->broker);
	free(v);
}

static bool directory_sane(const shmq_directory_desc *d, uint64_t size)
{
	directory_plan p = plan_directory();

	return size == p.size && d->clients_at == p.clients && d->waiters_at == p.waiters &&
	       d->requests_at == p.requests && d->topics_at == p.topics && d->queues_at == p.queues &&
	       d->deadline_at == p.deadline && d->due_at == p.due && d->writers_at == p.writers &&
	       d->stores_at == p.stores && d->clients_committed <= SHMQ_CLIENTS &&
	       d->topics_committed <= SHMQ_TOPICS && d->queues_committed <= SHMQ_QUEUES &&
	       d->waiters_high <= SHMQ_WAITERS;
}

int directory_whole(shmq_broker *b)
{
	/* Read these first: without the registry lock the tables may grow meanwhile. */
	uint32_t clients = ld_acquire(&b->d->clients_committed); /* SYNC(clients-committed) */
	uint32_t topics = ld_acquire(&b->d->topics_committed);   /* SYNC(topics-committed) */
	uint32_t queues = ld_acquire(&b->d->queues_committed);   /* SYNC(queues-committed) */

	return clients_of(b) < clients || topics_of(b) < topics || queues_of(b) < queues
				   ? fail(SHMQ_CORRUPT,
				          "something has overwritten in the directory how many entries its tables "
				          "have; stop the broker (what is on disk is kept)")
				   : 0;
}

int shmq_broker_open(int fd, shmq_broker **out)
{
	directory_plan plan;
	shmq_broker *b;
	uint64_t size;
	int r = segment_check(fd, SHMQ_SEGMENT_DIRECTORY, &size);

	if (r)
		return r;
	b = calloc(1, sizeof(*b));
	if (!b)
		return SHMQ_NO_MEMORY;
	r = segment_map(fd, size, &b->base);
	if (r)
		goto fail;
	b->size = size;
	b->d = (shmq_directory_desc *)(void *)b->base;
	plan = plan_directory();
	r = segment_commit(b->base, 0, plan.first);
	if (!r)
		r = segment_commit(b->base, plan.deadline, plan.size - plan.deadline);
	if (!r && !directory_sane(b->d, size))
		r = fail(SHMQ_CORRUPT, "the directory's offsets cannot be right");
	if (r) {
		segment_unmap(b->base, size);
		goto fail;
	}
	b->clients = (void *)(b->base + plan.clients);
	b->waiters = (void *)(b->base + plan.waiters);
	b->requests = (void *)(b->base + plan.requests);
	b->topics = (void *)(b->base + plan.topics);
	b->entries = (void *)(b->base + plan.queues);
	b->next_deadline = (void *)(b->base + plan.deadline);
	b->next_due = (void *)(b->base + plan.due);
	b->writers = (void *)(b->base + plan.writers);
	b->stores = (void *)(b->base + plan.stores);
	r = directory_whole(b);
	if (r) {
		segment_unmap(b->base, size);
		goto fail;
	}
	b->fork_generation = ld(&fork_count);
	b->bell = SHMQ_NONE;
	st(&b->references, 1);
	pthread_mutex_init(&b->mutex, NULL);
	*out = b;
	return 0;
fail:
	free(b);
	return r;
}

static heap heap_place(shmq_map *map, uint64_t when, uint64_t slot, _Atomic uint32_t *length)
{
	return (heap){(void *)(map->base + when),
	              (void *)(map->base + slot),
	              length,
	              map->slots,
	              &map->slots_backed,
	              &map->q->dirty};
}

void map_place(shmq_map *map, const queue_plan *p)
{
	shmq_queue_desc *q = (shmq_queue_desc *)(void *)map->base;

	map->q = q;
	map->slots_max = p->slots_max;
	map->low_water = low_water_of(map);
	map->slots = (void *)(map->base + p->slots);
	map->ready = (void *)(map->base + p->ready);
	map->defer = (void *)(map->base + p->defer);
	map->requeue = (void *)(map->base + p->requeue);
	map->free = (void *)(map->base + p->free);
	map->in_flight = heap_place(map, p->in_flight_when, p->in_flight_slot, &q->in_flight_len);
	map->deferred = heap_place(map, p->deferred_when, p->deferred_slot, &q->deferred_len);
	map->sessions = (void *)(map->base + p->sessions);
	map->leases = (void *)(map->base + p->leases);
	map->lease_holders = (void *)(map->base + p->lease_holders);
	map->latency = (void *)(map->base + p->latency);
	map->arena = map->base + p->arena;
}

/* Back the parts that every queue has, and those that its header claims; here, where no lock is
 * held. */
static int map_back(shmq_map *map)
{
	const shmq_queue_desc *q = map->q;
	uint64_t arena = ld(&q->arena_committed);
	int r = segment_commit(map->base, (uint64_t)((uint8_t *)map->latency - map->base),
	                       sizeof(shmq_latency_desc));

	if (!r)
		r = queue_commit_slots(map, at_most(ld(&q->slots_committed), map->slots_max));
	if (!r)
		r = queue_commit_arena(map, arena < map->arena_max ? arena : map->arena_max);
	if (!r && ld(&q->leases_committed))
		r = queue_commit_leases(map);
	return r || sessions_of(map) < ld(&q->sessions_committed)
				   ? fail(SHMQ_CORRUPT,
				          "queue segment %llu: its header tells of pages that it does not have, "
				          "and /dev/shm has no room for them",
				          (unsigned long long)map->serial)
				   : 0;
}

/* Copy the fixed words of the header, and check them and everything else against the copy. */
static bool queue_sane(shmq_map *map, queue_plan *out)
{
	const shmq_queue_desc *q = map->q;
	queue_plan p;

	map->topic = q->topic;
	map->mem_queue_size = q->mem_queue_size;
	map->in_flight_slots = q->in_flight_slots;
	map->arena_max = q->arena_max;
	if (!map->in_flight_slots ||
	    (uint64_t)map->mem_queue_size + map->in_flight_slots > SHMQ_SLOTS_MAX ||
	    map->arena_max > SHMQ_ARENA_MAX)
		return false;
	*out = p = plan_queue(map->mem_queue_size, map->in_flight_slots, map->arena_max);
	return map->size == p.size && q->slots_max == p.slots_max && q->slots_at == p.slots &&
	       q->ready_at == p.ready && q->defer_at == p.defer && q->requeue_at == p.requeue &&
	       q->free_at == p.free && q->in_flight_when_at == p.in_flight_when &&
	       q->in_flight_slot_at == p.in_flight_slot && q->deferred_when_at == p.deferred_when &&
	       q->deferred_slot_at == p.deferred_slot && q->sessions_at == p.sessions &&
	       q->leases_at == p.leases && q->lease_holders_at == p.lease_holders &&
	       q->latency_at == p.latency && q->arena_at == p.arena && map->topic < SHMQ_TOPICS &&
	       q->slots_committed <= p.slots_max && ld(&q->in_flight_len) <= p.slots_max &&
	       ld(&q->deferred_len) <= p.slots_max &&
	       q->ring_mask >=
	               power_of_two(q->slots_committed) - 1 && /* above it: the queue is growing */
	       q->ring_mask < power_of_two(p.slots_max) &&
	       !(q->ring_mask & (q->ring_mask + 1)) && q->arena_committed <= map->arena_max &&
	       q->sessions_committed <= SHMQ_SESSIONS;
}

int map_open(int fd, uint32_t index, uint64_t serial, const uint64_t instance[2], shmq_map **out)
{
	shmq_map *map;
	queue_plan plan;
	uint64_t size;
	int r = segment_check(fd, SHMQ_SEGMENT_QUEUE, &size);

	if (r)
		return r;
	if (size < sizeof(shmq_queue_desc))
		return fail(SHMQ_CORRUPT, "the queue segment is shorter than its header");
	map = calloc(1, sizeof(*map));
	if (!map)
		return SHMQ_NO_MEMORY;
	r = segment_map(fd, size, &map->base);
	if (r)
		goto fail;
	map->size = size;
	map->index = index;
	map->serial = serial;
	map->q = (shmq_queue_desc *)(void *)map->base;
	r = segment_commit(map->base, 0, sizeof(shmq_queue_desc));
	if (r)
		goto unmap;
	if (!TRUST_CHECK(queue_sane(map, &plan)) || map->q->index != index ||
	    map->q->segment.serial != serial || map->q->segment.instance[0] != instance[0] ||
	    map->q->segment.instance[1] != instance[1]) {
		r = fail(SHMQ_CORRUPT,
		         "queue segment %llu: its header cannot be right, or it belongs "
		         "to another instance",
		         (unsigned long long)serial);
		goto unmap;
	}
	map_place(map, &plan);
	r = map_back(map);
	if (r)
		goto unmap;
	st(&map->references, 1);
	*out = map;
	return 0;
unmap:
	segment_unmap(map->base, size);
fail:
	free(map);
	return r;
}

void map_hold(shmq_map *map)
{
	atomic_fetch_add(&map->references, 1);
}

void map_release(shmq_map *map)
{
	if (map && atomic_fetch_sub(&map->references, 1) == 1) {
		segment_unmap(map->base, map->size);
		free(map);
	}
}
