/*
 * Mapping and checking segments. A segment is made by one process: sized, reserved, filled, and
 * READY is stored last; a death on the way leaves SHMQ_RAW_STATE, which no opener accepts. Openers check
 * size, magic, layout version, fingerprint, boot, and every offset before they use any.
 */
#include "internal.h"
#include "owner.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

uint64_t round_page(uint64_t bytes)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

	return (bytes + page - 1) / page * page;
}

int segment_map(int fd, uint64_t size, uint8_t **base)
{
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (p == MAP_FAILED) {
		if (errno == ENOMEM)
			return because(SHMQ_NO_MEMORY,
			               "mapping %llu bytes was refused: raise RLIMIT_AS (ulimit -v) or "
			               "vm.max_map_count",
			               (unsigned long long)size);
		return because(SHMQ_LAYOUT, "mapping failed: %s", strerror(errno));
	}
	*base = p;
	return 0;
}

void segment_unmap(uint8_t *base, uint64_t size)
{
	if (base)
		munmap(base, size);
}

static int populate(uint8_t *at, uint64_t bytes)
{
	int how = MADV_POPULATE_WRITE;

	while (madvise(at, bytes, how)) {
		if (errno == EINTR || errno == EAGAIN)
			continue;
		if (errno != EINVAL)
			return because(SHMQ_NO_SPACE, "the shared memory file system (/dev/shm) or the memory "
			                              "limit is full");
		if (how == MADV_POPULATE_READ)
			return 0; /* before Linux 5.14: the creator has reserved the whole file */
		how = MADV_POPULATE_READ; /* mapped to be read */
	}
	return 0;
}

int segment_commit(uint8_t *base, uint64_t at, uint64_t bytes)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), end = round_page(at + bytes);
	unsigned char there[2048];

	/* What is there already is only looked at: to populate it costs seven times as much. */
	for (at = at / page * page; at < end;) {
		uint64_t pages = (end - at) / page;
		int r = 0;

		if (pages > sizeof(there))
			pages = sizeof(there);
		if (mincore(base + at, pages * page, there) || memchr(there, 0, pages))
			r = populate(base + at, pages * page); /* a hole, or swapped out */
		if (r)
			return r;
		at += pages * page;
	}
	return 0;
}

void segment_punch(uint8_t *base, uint64_t from, uint64_t to)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);

	from = round_page(from);
	to = to / page * page;
	if (from < to)
		(void)madvise(base + from, to - from, MADV_REMOVE); /* not supported: they stay */
}

bool shmq_segment_has_pages(const void *base, uint64_t at, uint64_t bytes)
{
	return !segment_commit((uint8_t *)(uintptr_t)base, at, bytes);
}

uint32_t table_backed(uint8_t *base, const void *table, size_t entry, uint32_t n, uint32_t most,
                      _Atomic uint32_t *backed)
{
	uint32_t have = ld(backed);

	if (n <= have)
		return n;
	if (n > most || segment_commit(base, (uint64_t)((const uint8_t *)table - base) + have * entry,
	                               (n - have) * entry))
		return have;
	st(backed, n);
	return n;
}

static bool populate_works(uint8_t *base)
{
	return !madvise(base, (size_t)sysconf(_SC_PAGESIZE), MADV_POPULATE_WRITE) || errno != EINVAL;
}

/* Reserve what is used from the start; everything where pages cannot be reserved later. */
static int segment_reserve(int fd, uint8_t *base, uint64_t size, uint64_t first)
{
	int r;

	if (populate_works(base))
		return segment_commit(base, 0, first);
	do
		r = posix_fallocate(fd, 0, (off_t)size);
	while (r == EINTR);
	return r ? because(SHMQ_NO_SPACE, "reserving %llu bytes: %s", (unsigned long long)size,
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

int segment_check(int fd, enum shmq_segment_kind kind, uint64_t *size)
{
	shmq_segment_desc s;
	uint64_t boot[2];
	struct stat st;

	because_nothing();
	if (fstat(fd, &st) || st.st_size < (off_t)sizeof(s) ||
	    pread(fd, &s, sizeof(s), 0) != (ssize_t)sizeof(s))
		return because(SHMQ_LAYOUT, "the segment is shorter than its header: not made by shmq, "
		                            "or its creator died");
	if (s.magic != SHMQ_MAGIC)
		return because(SHMQ_LAYOUT, "the magic number is missing: not made by shmq, or its "
		                            "creator died");
	if (s.layout_version != SHMQ_LAYOUT_VERSION)
		return because(SHMQ_LAYOUT,
		               "it has layout version %u, this shmq has %d: stop it with the version "
		               "that started it (shmq serve --drain), or install that version",
		               s.layout_version, SHMQ_LAYOUT_VERSION);
	if (s.fingerprint != shmq_layout_fingerprint())
		return because(SHMQ_LAYOUT, "another build made it (sizes, alignment, page size or libc "
		                            "differ): use one build on both sides");
	if (s.kind != (uint32_t)kind)
		return because(SHMQ_LAYOUT, "it is the wrong kind of segment");
	if (s.ready == SHMQ_CLOSED_STATE)
		return SHMQ_GONE;
	if (s.ready != SHMQ_READY_STATE)
		return because(SHMQ_LAYOUT, "it is not ready: its creator is at work or died");
	boot_identity(boot);
	if (boot[0] != s.boot_id[0] || boot[1] != s.boot_id[1])
		return because(SHMQ_LAYOUT, "it was made before the last boot, or in another machine's "
		                            "container: remove it with shmq doctor");
	if (s.size != (uint64_t)st.st_size)
		return because(SHMQ_LAYOUT, "it is %lld bytes long, its header says %llu: truncated",
		               (long long)st.st_size, (unsigned long long)s.size);
	*size = s.size;
	return 0;
}

/* ---- directory ---- */

typedef struct directory_plan {
	uint64_t clients, waiters, requests, topics, queues, deadline, due, writers, size, first;
} directory_plan;

static directory_plan plan_directory(void)
{
	directory_plan p;

	p.requests = sizeof(shmq_directory_desc);
	p.waiters = p.requests + SHMQ_REQUESTS * sizeof(shmq_request_desc);
	p.clients = round_page(p.waiters + SHMQ_WAITERS * sizeof(shmq_waiter_desc));
	p.topics = p.clients + SHMQ_CLIENTS * sizeof(shmq_client_desc);
	p.queues = round_page(p.topics + SHMQ_TOPICS * sizeof(shmq_topic_desc));
	p.deadline = round_page(p.queues + SHMQ_QUEUES * sizeof(shmq_entry_desc));
	p.due = round_page(p.deadline + SHMQ_QUEUES * sizeof(int64_t));
	p.writers = round_page(p.due + SHMQ_QUEUES * sizeof(int64_t));
	p.size = round_page(p.writers + SHMQ_WRITERS * sizeof(shmq_writer_desc));
	p.first = p.clients;
	return p;
}

uint64_t shmq_directory_bytes(void)
{
	return plan_directory().size;
}

static void limits_store(shmq_limits_desc *to, const shmq_limits *from)
{
	to->msg_timeout = from->msg_timeout_ns;
	to->max_msg_timeout = from->max_msg_timeout_ns;
	to->max_req_timeout = from->max_req_timeout_ns;
	to->max_msg_size = from->max_msg_size;
	to->node_id = from->node_id;
	to->mem_queue_size = from->mem_queue_size;
	to->inflight_slots = from->inflight_slots;
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
	                     .inflight_slots = from->inflight_slots};
}

static int limits_check(const shmq_limits *l)
{
	uint64_t slots = (uint64_t)l->mem_queue_size + l->inflight_slots;

	if (l->inflight_slots < 16 || slots > 1u << 23 || l->arena_size < 2 * SHMQ_ARENA_FIRST ||
	    l->arena_size > (uint64_t)1 << 38 || l->node_id >= 1u << SHMQ_ID_NODE_BITS ||
	    !l->max_msg_size || l->max_msg_size > l->arena_size / 4 * 3 || l->msg_timeout_ns <= 0 ||
	    l->max_msg_timeout_ns <= 0 || l->max_req_timeout_ns < 0)
		return because(SHMQ_INVALID,
		               "limits: inflight_slots >= 16, all slots <= 8388608, 64 KiB <= arena_size "
		               "<= 256 GiB, max_msg_size <= 3/4 of arena_size, node_id < 1024");
	return 0;
}

int shmq_directory_create(int fd, const shmq_limits *limits)
{
	directory_plan p = plan_directory();
	uint64_t instance[2];
	uint8_t *base = NULL;
	shmq_directory_desc *d;
	int r = limits_check(limits);

	if (r)
		return r;
	because_nothing();
	if (ftruncate(fd, (off_t)p.size))
		return because(SHMQ_NO_SPACE, "sizing the directory: %s", strerror(errno));
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
	d->pid_namespace = pid_namespace_inode();
	st(&d->next_serial, 1);
	for (uint32_t i = 0; i < SHMQ_WAITERS && !r; i++)
		r = sem_init(&((shmq_waiter_desc *)(void *)(base + p.waiters))[i].bell, 1, 0);
	for (uint32_t i = 0; i < 2 * SHMQ_QUEUES; i++) {
		int64_t *column = (int64_t *)(void *)(base + (i < SHMQ_QUEUES ? p.deadline : p.due));

		column[i % SHMQ_QUEUES] = INT64_MAX;
	}
	SHMQ_KILLPOINT("directory.ready");
	st_release(&d->segment.ready, SHMQ_READY_STATE);
out:
	segment_unmap(base, p.size);
	return r;
}

static bool directory_sane(const shmq_directory_desc *d, uint64_t size)
{
	directory_plan p = plan_directory();

	return size == p.size && d->clients_at == p.clients && d->waiters_at == p.waiters &&
	       d->requests_at == p.requests && d->topics_at == p.topics && d->queues_at == p.queues &&
	       d->deadline_at == p.deadline && d->due_at == p.due &&
	       d->writers_at == p.writers &&
	       d->clients_committed <= SHMQ_CLIENTS && d->topics_committed <= SHMQ_TOPICS &&
	       d->queues_committed <= SHMQ_QUEUES && d->waiters_high <= SHMQ_WAITERS;
}

int directory_whole(shmq_broker *b)
{
	/* read first: who does not hold the registry may see them grow */
	uint32_t clients = ld_acquire(&b->d->clients_committed);
	uint32_t topics = ld_acquire(&b->d->topics_committed);
	uint32_t queues = ld_acquire(&b->d->queues_committed);

	return clients_of(b) < clients || topics_of(b) < topics || queues_of(b) < queues
	               ? because(SHMQ_CORRUPT,
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
		r = because(SHMQ_CORRUPT, "the directory's offsets cannot be right");
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

/* ---- queue ---- */

typedef struct queue_plan {
	uint64_t slots, ready, defer, requeue, free, inflight_when, inflight_slot, deferred_when,
		deferred_slot, sessions, leases, lessees, latency, arena, size;
	uint32_t slots_max;
} queue_plan;

/* Enough to keep consumers busy until the next read, also where little may be in memory. */
static uint32_t low_water(const shmq_map *map)
{
	uint32_t most = map->inflight_slots / 2, busy = at_most(map->inflight_slots / 8, 1024);
	uint32_t quarter = ready_budget(map) / 4;

	return at_most(quarter > busy ? quarter : busy, most);
}

static uint32_t power_of_two(uint32_t n)
{
	return n <= 1 ? 1 : 1u << (32 - __builtin_clz(n - 1));
}

static queue_plan plan_queue(uint32_t mem_queue_size, uint32_t inflight_slots, uint64_t arena_max)
{
	queue_plan p;
	uint64_t n, cap;

	p.slots_max = (mem_queue_size > SHMQ_TRANSIT ? mem_queue_size : SHMQ_TRANSIT) + inflight_slots;
	n = p.slots_max;
	cap = power_of_two(p.slots_max);
	p.slots = sizeof(shmq_queue_desc);
	p.ready = round_page(p.slots + n * sizeof(shmq_slot_desc));
	p.defer = round_page(p.ready + cap * 4);
	p.requeue = round_page(p.defer + cap * 4);
	p.free = round_page(p.requeue + cap * 4);
	p.inflight_when = round_page(p.free + cap * 4);
	p.inflight_slot = round_page(p.inflight_when + n * 8);
	p.deferred_when = round_page(p.inflight_slot + n * 4);
	p.deferred_slot = round_page(p.deferred_when + n * 8);
	p.sessions = round_page(p.deferred_slot + n * 4);
	p.leases = round_page(p.sessions + SHMQ_SESSIONS * sizeof(shmq_session_desc));
	p.lessees = round_page(p.leases + SHMQ_LEASES * sizeof(shmq_lease_desc));
	p.latency = round_page(p.lessees + SHMQ_LESSEES * sizeof(shmq_lessee_desc));
	p.arena = round_page(p.latency + sizeof(shmq_latency_desc));
	p.size = round_page(p.arena + arena_max);
	return p;
}

uint64_t shmq_queue_bytes(const shmq_limits *l)
{
	return plan_queue(l->mem_queue_size, l->inflight_slots, round_page(l->arena_size)).size;
}

static heap heap_place(shmq_map *map, uint64_t when, uint64_t slot, _Atomic uint32_t *length)
{
	return (heap){(void *)(map->base + when), (void *)(map->base + slot), length, map->slots,
	              &map->slots_backed,         &map->q->dirty};
}

/* Where everything is: by the plan, not by what the header says again. */
static void map_place(shmq_map *map, const queue_plan *p)
{
	shmq_queue_desc *q = (shmq_queue_desc *)(void *)map->base;

	map->q = q;
	map->slots_max = p->slots_max;
	map->low_water = low_water(map);
	map->slots = (void *)(map->base + p->slots);
	map->ready = (void *)(map->base + p->ready);
	map->defer = (void *)(map->base + p->defer);
	map->requeue = (void *)(map->base + p->requeue);
	map->free = (void *)(map->base + p->free);
	map->inflight = heap_place(map, p->inflight_when, p->inflight_slot, &q->inflight_len);
	map->deferred = heap_place(map, p->deferred_when, p->deferred_slot, &q->deferred_len);
	map->sessions = (void *)(map->base + p->sessions);
	map->leases = (void *)(map->base + p->leases);
	map->lessees = (void *)(map->base + p->lessees);
	map->latency = (void *)(map->base + p->latency);
	map->arena = map->base + p->arena;
}

int queue_commit_slots(shmq_map *map, uint32_t n)
{
	uint32_t from = ld(&map->slots_backed);
	uint64_t rings = from ? power_of_two(from) : 0, cap = power_of_two(n);
	struct {
		const void *at;
		uint64_t from, to, size;
	} part[] = {
		{map->slots, from, n, sizeof(shmq_slot_desc)},
		{map->ready, rings, cap, 4},
		{map->defer, rings, cap, 4},
		{map->requeue, rings, cap, 4},
		{map->free, rings, cap, 4},
		{map->inflight.when, from, n, 8},
		{map->inflight.slot, from, n, 4},
		{map->deferred.when, from, n, 8},
		{map->deferred.slot, from, n, 4},
	};

	if (n <= from)
		return 0;
	for (size_t i = 0; i < sizeof(part) / sizeof(part[0]); i++) {
		uint64_t at = (uint64_t)((const uint8_t *)part[i].at - map->base);
		int r = segment_commit(map->base, at + part[i].from * part[i].size,
		                       (part[i].to - part[i].from) * part[i].size);

		if (r)
			return r;
	}
	if (n > ld(&map->slots_backed)) {
		st(&map->slots_backed, n);
		st(&map->rings_backed, (uint32_t)cap - 1);
	}
	return 0;
}

uint32_t slots_back(shmq_map *map, uint32_t n)
{
	return n <= map->slots_max && !queue_commit_slots(map, n) ? n : ld(&map->slots_backed);
}

bool slots_behind(const shmq_map *map, uint32_t n)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	uint64_t at = (uint64_t)((uint8_t *)&map->slots[n] - map->base);
	uint64_t end = (uint64_t)((uint8_t *)&map->slots[map->slots_max] - map->base);
	unsigned char there[2048];

	while (at < end) {
		uint64_t first = at / page * page, most = first + sizeof(there) * page;
		uint64_t to = most < end ? most : end;

		if (mincore(map->base + first, to - first, there))
			return false;
		while (at < to)
			if (!(there[(at - first) / page] & 1))
				at = (at / page + 1) * page;
			else if (ld(&((shmq_slot_desc *)(void *)(map->base + at))->word))
				return true;
			else
				at += sizeof(shmq_slot_desc);
	}
	return false;
}

int queue_commit_arena(shmq_map *map, uint64_t end)
{
	uint64_t have = ld(&map->arena_backed);
	int r = end <= have ? 0
	                    : segment_commit(map->base, (uint64_t)(map->arena - map->base) + have,
	                                     end - have);

	if (!r && end > have)
		st(&map->arena_backed, end);
	return r;
}

int queue_grow_arena(shmq_map *map, uint64_t have, uint64_t end)
{
	int r = segment_commit(map->base, (uint64_t)(map->arena - map->base) + have, end - have);

	if (!r && end > ld(&map->arena_backed))
		st(&map->arena_backed, end);
	return r;
}

int queue_commit_leases(shmq_map *map)
{
	int r = segment_commit(map->base, (uint64_t)((uint8_t *)map->leases - map->base),
	                       SHMQ_LEASES * sizeof(shmq_lease_desc));

	if (!r)
		r = segment_commit(map->base, (uint64_t)((uint8_t *)map->lessees - map->base),
		                   SHMQ_LESSEES * sizeof(shmq_lessee_desc));
	if (!r)
		st(&map->leases_backed, 1);
	return r;
}

/* What every queue has, and what its header says it has. Here, where no lock is held. */
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
	               ? because(SHMQ_CORRUPT,
	                         "queue segment %llu: its header tells of pages that it does not have, "
	                         "and /dev/shm has no room for them",
	                         (unsigned long long)map->serial)
	               : 0;
}

int shmq_queue_create(shmq_broker *b, int fd, uint32_t queue, uint64_t serial, uint32_t topic,
                      const char *file_base, uint64_t disk_read, uint64_t disk_write,
                      uint64_t disk_depth, bool ephemeral, bool paused)
{
	shmq_limits limits = limits_load(&b->d->limits);
	shmq_map map = {.index = queue,
	                .topic = topic,
	                .mem_queue_size = limits.mem_queue_size,
	                .inflight_slots = limits.inflight_slots,
	                .arena_max = round_page(limits.arena_size)};
	shmq_queue_desc *q;
	queue_plan p;
	uint32_t first;
	int r = limits_check(&limits);

	if (r)
		return r;
	because_nothing();
	if (strlen(file_base) >= SHMQ_BASE || topic >= topics_of(b))
		return SHMQ_INVALID;
	p = plan_queue(map.mem_queue_size, map.inflight_slots, map.arena_max);
	first = p.slots_max < SHMQ_SLOTS_FIRST ? p.slots_max : SHMQ_SLOTS_FIRST;
	if (ftruncate(fd, (off_t)p.size))
		return because(SHMQ_NO_SPACE, "sizing the queue: %s", strerror(errno));
	r = segment_map(fd, p.size, &map.base);
	if (r)
		return r;
	r = segment_reserve(fd, map.base, p.size, sizeof(shmq_queue_desc));
	if (r)
		goto out;
	q = (shmq_queue_desc *)(void *)map.base;
	segment_fill(&q->segment, SHMQ_SEGMENT_QUEUE, p.size, serial, b->d->segment.instance);
	q->index = queue;
	q->topic = topic;
	q->slots_max = p.slots_max;
	q->mem_queue_size = map.mem_queue_size;
	q->inflight_slots = map.inflight_slots;
	q->low_water = low_water(&map);
	q->flags = ephemeral ? SHMQ_FLAG_EPHEMERAL : 0;
	q->arena_max = map.arena_max;
	q->slots_at = p.slots;
	q->ready_at = p.ready;
	q->defer_at = p.defer;
	q->requeue_at = p.requeue;
	q->free_at = p.free;
	q->inflight_when_at = p.inflight_when;
	q->inflight_slot_at = p.inflight_slot;
	q->deferred_when_at = p.deferred_when;
	q->deferred_slot_at = p.deferred_slot;
	q->sessions_at = p.sessions;
	q->leases_at = p.leases;
	q->lessees_at = p.lessees;
	q->latency_at = p.latency;
	q->arena_at = p.arena;
	SHMQ_KILLPOINT("queue.filled");
	map_place(&map, &p);
	r = queue_commit_slots(&map, first);
	if (!r)
		r = queue_commit_arena(&map, SHMQ_ARENA_FIRST);
	if (!r)
		r = segment_commit(map.base, q->sessions_at,
		                   SHMQ_SESSIONS_FIRST * sizeof(shmq_session_desc));
	if (!r)
		r = segment_commit(map.base, q->latency_at, sizeof(shmq_latency_desc));
	if (!r)
		r = lock_init(&q->deliver);
	if (r)
		goto out;
	st(&q->slots_committed, first);
	st(&q->ring_mask, power_of_two(first) - 1);
	st(&q->sessions_committed, SHMQ_SESSIONS_FIRST);
	st(&q->arena_committed, SHMQ_ARENA_FIRST);
	st(&q->disk_read, disk_read);
	st(&q->disk_write, disk_write);
	st(&q->disk_depth, disk_depth);
	st(&q->paused, paused);
	st(&q->order, SHMQ_ORDER_FIRST);
	strcpy(q->base, file_base);
	r = queue_rebuild(b, &map, false);
	if (r)
		goto out;
	SHMQ_KILLPOINT("queue.ready");
	st_release(&q->segment.ready, SHMQ_READY_STATE);
out:
	segment_unmap(map.base, p.size);
	return r;
}

/* Copies what the header says of its making and checks it and all else by that. */
static bool queue_sane(shmq_map *map, queue_plan *out)
{
	const shmq_queue_desc *q = map->q;
	queue_plan p;

	map->topic = q->topic;
	map->mem_queue_size = q->mem_queue_size;
	map->inflight_slots = q->inflight_slots;
	map->arena_max = q->arena_max;
	if (!map->inflight_slots || (uint64_t)map->mem_queue_size + map->inflight_slots > 1u << 23 ||
	    map->arena_max > (uint64_t)1 << 38)
		return false;
	*out = p = plan_queue(map->mem_queue_size, map->inflight_slots, map->arena_max);
	return map->size == p.size && q->slots_max == p.slots_max &&
	       q->slots_at == p.slots && q->ready_at == p.ready && q->defer_at == p.defer &&
	       q->requeue_at == p.requeue && q->free_at == p.free &&
	       q->inflight_when_at == p.inflight_when && q->inflight_slot_at == p.inflight_slot &&
	       q->deferred_when_at == p.deferred_when && q->deferred_slot_at == p.deferred_slot &&
	       q->sessions_at == p.sessions && q->leases_at == p.leases &&
	       q->lessees_at == p.lessees &&
	       q->latency_at == p.latency && q->arena_at == p.arena &&
	       map->topic < SHMQ_TOPICS && q->slots_committed <= p.slots_max &&
	       ld(&q->inflight_len) <= p.slots_max && ld(&q->deferred_len) <= p.slots_max &&
	       q->ring_mask >= power_of_two(q->slots_committed) - 1 && /* above it: amid growing */
	       q->ring_mask < power_of_two(p.slots_max) && !(q->ring_mask & (q->ring_mask + 1)) &&
	       q->arena_committed <= map->arena_max && q->sessions_committed <= SHMQ_SESSIONS;
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
		return because(SHMQ_CORRUPT, "the queue segment is shorter than its header");
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
	if (!SANE(queue_sane(map, &plan)) || map->q->index != index ||
	    map->q->segment.serial != serial || map->q->segment.instance[0] != instance[0] ||
	    map->q->segment.instance[1] != instance[1]) {
		r = because(SHMQ_CORRUPT, "queue segment %llu: its header cannot be right, or it belongs "
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
