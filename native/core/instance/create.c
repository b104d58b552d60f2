/*
 * Making segments. A segment is sized, reserved and filled, and its `ready` word is stored last.
 *
 * death before `ready`: the segment stays SHMQ_RAW_STATE, and the supervisor's sweep removes it.
 */
#include "instance/create.h"

#include "base/atomics.h"
#include "base/killpoint.h"
#include "base/libc.h"
#include "base/process.h"
#include "base/status.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "queue/rebuild.h"
#include "queue/settings.h"
#include "shmq.h"
#include "shmq_store.h"
#include "shmq_supervisor.h"
#include "sync/lock.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define BYTES_LEAST (UINT64_C(1) << 16)

int shmq_store_limits_check(uint64_t max_keys, uint64_t max_bytes)
{
	if (max_keys - 1 < SHMQ_STORE_KEYS_MAX && max_bytes >= BYTES_LEAST &&
	    max_bytes <= SHMQ_ARENA_MAX)
		return 0;
	return fail(SHMQ_INVALID,
	            "a results store has 1 to 16777216 keys (max_keys) and 65536 bytes to 256 GiB "
	            "(max_bytes)");
}

static bool populate_works(uint8_t *base)
{
	return !madvise(base, (size_t)sysconf(_SC_PAGESIZE), MADV_POPULATE_WRITE) || errno != EINVAL;
}

int segment_reserve(int fd, uint8_t *base, uint64_t size, uint64_t first)
{
	int r;

	if (populate_works(base))
		return segment_commit(base, 0, first);
	do
		r = posix_fallocate(fd, 0, (off_t)size);
	while (r == EINTR);
	return r ? fail(SHMQ_NO_SPACE, "reserving %llu bytes: %s", (unsigned long long)size,
	                strerror(r))
	         : 0;
}

void segment_fill(shmq_segment_desc *s, enum shmq_segment_kind kind, uint64_t size, uint64_t serial,
                  const uint64_t instance[2])
{
	s->magic = SHMQ_MAGIC;
	s->layout_version = SHMQ_LAYOUT_VERSION;
	s->kind = kind;
	s->fingerprint = shmq_layout_fingerprint();
	boot_identity(s->boot_id);
	s->instance[0] = instance[0];
	s->instance[1] = instance[1];
	s->size = size;
	s->serial = serial;
	s->page_size = (uint32_t)sysconf(_SC_PAGESIZE);
}

void limits_store(shmq_limits_desc *to, const shmq_limits *from)
{
	to->msg_timeout = from->msg_timeout_ns;
	to->max_msg_timeout = from->max_msg_timeout_ns;
	to->max_req_timeout = from->max_req_timeout_ns;
	to->max_msg_size = from->max_msg_size;
	to->node_id = from->node_id;
	to->mem_queue_size = from->mem_queue_size;
	to->in_flight_slots = from->in_flight_slots;
	to->arena_size = from->arena_size;
}

static shmq_limits limits_load(const shmq_limits_desc *from)
{
	return (shmq_limits){.msg_timeout_ns = from->msg_timeout,
	                     .max_msg_timeout_ns = from->max_msg_timeout,
	                     .max_req_timeout_ns = from->max_req_timeout,
	                     .max_msg_size = from->max_msg_size,
	                     .arena_size = from->arena_size,
	                     .node_id = from->node_id,
	                     .mem_queue_size = from->mem_queue_size,
	                     .in_flight_slots = from->in_flight_slots};
}

static int limits_check(const shmq_limits *l)
{
	uint64_t slots = (uint64_t)l->mem_queue_size + l->in_flight_slots;

	if (l->in_flight_slots < 16 || slots > SHMQ_SLOTS_MAX || l->arena_size < 2 * SHMQ_ARENA_FIRST ||
	    l->arena_size > SHMQ_ARENA_MAX || l->node_id >= 1u << SHMQ_ID_NODE_BITS ||
	    !l->max_msg_size || l->max_msg_size > l->arena_size / 4 * 3 || l->msg_timeout_ns <= 0 ||
	    l->max_msg_timeout_ns <= 0 || l->max_req_timeout_ns < 0)
		return fail(SHMQ_INVALID,
		            "limits: in_flight_slots >= 16, all slots <= 33554432, 64 KiB <= arena_size "
		            "<= 256 GiB, max_msg_size <= 3/4 of arena_size, node_id < 1024");
	return 0;
}

int shmq_directory_create(int fd, const shmq_limits *limits, const uint8_t *key)
{
	directory_plan p = plan_directory();
	uint64_t instance[2];
	uint8_t *base = NULL;
	shmq_directory_desc *d;
	int r = limits_check(limits);

	if (r)
		return r;
	error_clear();
	r = segment_size(fd, p.size, "directory");
	if (r)
		return r;
	r = segment_map(fd, p.size, &base);
	if (r)
		return r;
	r = segment_reserve(fd, base, p.size, p.first);
	if (!r)
		r = segment_commit(base, p.deadline, p.size - p.deadline);
	if (r)
		goto out;
	d = (shmq_directory_desc *)(void *)base;
	random_identity(instance);
	segment_fill(&d->segment, SHMQ_SEGMENT_DIRECTORY, p.size, 0, instance);
	SHMQ_KILLPOINT("directory.filled");
	limits_store(&d->limits, limits);
	if (key)
		memcpy(d->seal_key, key, SHMQ_SEAL_KEY);
	r = lock_init(&d->registry);
	if (r)
		goto out;
	d->clients_at = p.clients;
	d->waiters_at = p.waiters;
	d->requests_at = p.requests;
	d->topics_at = p.topics;
	d->queues_at = p.queues;
	d->deadline_at = p.deadline;
	d->due_at = p.due;
	d->writers_at = p.writers;
	d->stores_at = p.stores;
	d->pid_namespace = pid_namespace_inode();
	st(&d->next_serial, 1);
	for (uint32_t i = 0; i < SHMQ_WAITERS && !r; i++)
		r = sem_init(&((shmq_waiter_desc *)(void *)(base + p.waiters))[i].bell, 1, 0);
	for (uint32_t i = 0; i < 2 * SHMQ_QUEUES; i++) {
		int64_t *column = (int64_t *)(void *)(base + (i < SHMQ_QUEUES ? p.deadline : p.due));

		column[i % SHMQ_QUEUES] = INT64_MAX;
	}
	SHMQ_KILLPOINT("directory.ready");
	st_release(&d->segment.ready, SHMQ_READY_STATE); /* SYNC(segment-ready) */
out:
	segment_unmap(base, p.size);
	return r;
}

/* Fill the header's fixed words. */
static void queue_fill(shmq_broker *b, const shmq_map *map, const queue_plan *p,
                       const shmq_queue_spec *spec)
{
	shmq_queue_desc *q = (shmq_queue_desc *)(void *)map->base;

	segment_fill(&q->segment, SHMQ_SEGMENT_QUEUE, p->size, spec->serial, b->d->segment.instance);
	q->index = map->index;
	q->topic = map->topic;
	q->slots_max = p->slots_max;
	q->mem_queue_size = map->mem_queue_size;
	q->in_flight_slots = map->in_flight_slots;
	q->low_water = low_water_of(map);
	q->flags = spec->ephemeral ? SHMQ_FLAG_EPHEMERAL : 0;
	q->arena_max = map->arena_max;
	q->slots_at = p->slots;
	q->ready_at = p->ready;
	q->defer_at = p->defer;
	q->requeue_at = p->requeue;
	q->free_at = p->free;
	q->in_flight_when_at = p->in_flight_when;
	q->in_flight_slot_at = p->in_flight_slot;
	q->deferred_when_at = p->deferred_when;
	q->deferred_slot_at = p->deferred_slot;
	q->sessions_at = p->sessions;
	q->leases_at = p->leases;
	q->lease_holders_at = p->lease_holders;
	q->latency_at = p->latency;
	q->arena_at = p->arena;
}

/* Back the parts that a queue has from the start. */
static int queue_back(shmq_map *map, const queue_plan *p, uint32_t slots)
{
	int r = queue_commit_slots(map, slots);

	if (!r)
		r = queue_commit_arena(map, SHMQ_ARENA_FIRST);
	if (!r)
		r = segment_commit(map->base, p->sessions, SHMQ_SESSIONS_FIRST * sizeof(shmq_session_desc));
	return r ? r : segment_commit(map->base, p->latency, sizeof(shmq_latency_desc));
}

int shmq_queue_create(shmq_broker *b, int fd, const shmq_queue_spec *spec)
{
	shmq_limits limits = limits_load(&b->d->limits);
	shmq_map map = {.index = spec->queue,
	                .topic = spec->topic,
	                .mem_queue_size = limits.mem_queue_size,
	                .in_flight_slots = limits.in_flight_slots,
	                .arena_max = round_page(limits.arena_size)};
	shmq_queue_desc *q;
	queue_plan p;
	uint32_t first;
	int r = limits_check(&limits);

	if (r)
		return r;
	error_clear();
	if (strlen(spec->base) >= SHMQ_BASE || spec->topic >= topics_of(b))
		return SHMQ_INVALID;
	r = spec->settings ? settings_check(spec->settings) : 0;
	if (r)
		return r;
	p = plan_queue(map.mem_queue_size, map.in_flight_slots, map.arena_max);
	first = p.slots_max < SHMQ_SLOTS_FIRST ? p.slots_max : SHMQ_SLOTS_FIRST;
	r = segment_size(fd, p.size, "queue");
	if (r)
		return r;
	r = segment_map(fd, p.size, &map.base);
	if (r)
		return r;
	r = segment_reserve(fd, map.base, p.size, sizeof(shmq_queue_desc));
	if (r)
		goto out;
	queue_fill(b, &map, &p, spec);
	SHMQ_KILLPOINT("queue.filled");
	map_place(&map, &p);
	q = map.q;
	r = queue_back(&map, &p, first);
	if (!r)
		r = lock_init(&q->deliver);
	if (r)
		goto out;
	st(&q->slots_committed, first);
	st(&q->ring_mask, power_of_two(first) - 1);
	st(&q->sessions_committed, SHMQ_SESSIONS_FIRST);
	st(&q->arena_committed, SHMQ_ARENA_FIRST);
	st(&q->disk_read, spec->disk_read);
	st(&q->disk_write, spec->disk_write);
	st(&q->disk_depth, spec->disk_depth);
	st(&q->paused, spec->paused);
	st(&q->next_expiry, INT64_MAX);
	if (spec->settings)
		settings_store(q, spec->settings);
	st(&q->order, SHMQ_ORDER_FIRST);
	strcpy(q->base, spec->base);
	r = queue_rebuild(b, &map, false);
	if (r)
		goto out;
	SHMQ_KILLPOINT("queue.ready");
	st_release(&q->segment.ready, SHMQ_READY_STATE); /* SYNC(segment-ready) */
out:
	segment_unmap(map.base, p.size);
	return r;
}
