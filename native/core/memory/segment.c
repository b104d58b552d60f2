/*
 * A mapped segment: its size, the checks of its header, and the pages that back its parts.
 *
 * One process makes a segment (create.c). If it dies on the way, the segment stays SHMQ_RAW_STATE,
 * which no opener accepts. An opener checks size, magic, layout version, fingerprint, boot id and
 * every offset before it uses any.
 */
#include "memory/segment.h"

#include "base/atomics.h"
#include "base/libc.h"
#include "base/process.h"
#include "base/status.h"
#include "memory/handles.h"
#include "shmq.h"
#include "shmq_supervisor.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

/* Bytes of the smallest file system that can hold an instance. */
#define SHARED_MEMORY_LEAST (4U << 20)

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
			return fail(SHMQ_NO_MEMORY,
			            "mapping %llu bytes was refused: raise RLIMIT_AS (ulimit -v) or "
			            "vm.max_map_count",
			            (unsigned long long)size);
		return fail(SHMQ_LAYOUT, "mapping failed: %s", strerror(errno));
	}
	*base = p;
	return 0;
}

int segment_size(int fd, uint64_t size, const char *what)
{
	if (!ftruncate(fd, (off_t)size))
		return 0;
	if (errno == EFBIG)
		return fail(
				SHMQ_NO_MEMORY,
				"the %s takes %llu bytes of shared memory, and RLIMIT_FSIZE lets no file have so "
				"many: ulimit -f unlimited (systemd: LimitFSIZE=infinity)",
				what, (unsigned long long)size);
	return fail(SHMQ_NO_SPACE, "sizing the %s: %s", what, strerror(errno));
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
			return fail(SHMQ_NO_SPACE, "the shared memory file system (/dev/shm) or the memory "
			                           "limit is full");
		if (how == MADV_POPULATE_READ)
			return 0;             /* before Linux 5.14: the creator has reserved the whole file */
		how = MADV_POPULATE_READ; /* mapped for reading only */
	}
	return 0;
}

uint64_t shared_memory_below(uint64_t bytes)
{
	struct statvfs s;
	uint64_t has;

	/* A smaller one would not hold an instance; and the question is a system call. */
	if (bytes < SHARED_MEMORY_LEAST || statvfs("/dev/shm", &s))
		return 0;
	has = (uint64_t)s.f_blocks * s.f_frsize; /* 0: mounted without a limit */
	return bytes > has ? has : 0;
}

int segment_commit(uint8_t *base, uint64_t at, uint64_t bytes)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), end = round_page(at + bytes);
	unsigned char there[2048];

	/* Ask first which pages exist: populating a page that exists costs seven times as much. */
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

int segment_check(int fd, enum shmq_segment_kind kind, uint64_t *size)
{
	shmq_segment_desc s = {0};
	uint64_t boot[2];
	struct stat st;
	ssize_t have = pread(fd, &s, sizeof(s), 0);

	error_clear();
	if (have >= 0 && (!s.magic || s.magic == SHMQ_MAGIC) && s.ready == SHMQ_RAW_STATE)
		return fail(SHMQ_NOT_READY, "its creator is at work or died");
	if (have != (ssize_t)sizeof(s) || fstat(fd, &st))
		return fail(SHMQ_LAYOUT, "the segment is shorter than its header: not made by shmq");
	if (s.magic != SHMQ_MAGIC)
		return fail(SHMQ_LAYOUT, "the magic number is missing: not made by shmq");
	if (s.layout_version != SHMQ_LAYOUT_VERSION)
		return fail(SHMQ_LAYOUT,
		            "it has layout version %u, this shmq has %d: stop it with the version "
		            "that started it (shmq serve --drain), or install that version",
		            s.layout_version, SHMQ_LAYOUT_VERSION);
	if (s.fingerprint != shmq_layout_fingerprint())
		return fail(SHMQ_LAYOUT, "another build made it (sizes, alignment, page size or libc "
		                         "differ): use one build on both sides");
	if (s.kind != (uint32_t)kind)
		return fail(SHMQ_LAYOUT, "it is the wrong kind of segment");
	if (s.ready == SHMQ_CLOSED_STATE)
		return SHMQ_GONE;
	if (s.ready != SHMQ_READY_STATE) /* SYNC(segment-ready) */
		return fail(SHMQ_LAYOUT, "the word that says whether it is ready is garbage");
	boot_identity(boot);
	if (!boot[0] && !boot[1])
		return fail(SHMQ_FOREIGN, "/proc cannot be read (mount it), so nothing says that it is");
	if (boot[0] != s.boot_id[0] || boot[1] != s.boot_id[1])
		return fail(SHMQ_LAYOUT, "it was made before the last boot, or in another machine's "
		                         "container: remove it with shmq doctor");
	if (s.size != (uint64_t)st.st_size)
		return fail(SHMQ_LAYOUT, "it is %lld bytes long, its header says %llu: truncated",
		            (long long)st.st_size, (unsigned long long)s.size);
	*size = s.size;
	return 0;
}

directory_plan plan_directory(void)
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
	p.stores = round_page(p.writers + SHMQ_WRITERS * sizeof(shmq_writer_desc));
	p.size = round_page(p.stores + SHMQ_STORES * sizeof(shmq_store_entry_desc));
	p.first = p.clients;
	return p;
}

uint64_t shmq_directory_bytes(void)
{
	return plan_directory().size;
}

uint32_t low_water_of(const shmq_map *map)
{
	uint32_t most = map->in_flight_slots / 2, busy = at_most(map->in_flight_slots / 8, 1024);
	uint32_t quarter = ready_budget(map) / 4;

	return at_most(quarter > busy ? quarter : busy, most);
}

uint32_t power_of_two(uint32_t n)
{
	return n <= 1 ? 1 : 1u << (32 - __builtin_clz(n - 1));
}

queue_plan plan_queue(uint32_t mem_queue_size, uint32_t in_flight_slots, uint64_t arena_max)
{
	queue_plan p;
	uint64_t n, cap;

	p.slots_max = (mem_queue_size > SHMQ_TRANSIT ? mem_queue_size : SHMQ_TRANSIT) + in_flight_slots;
	n = p.slots_max;
	cap = power_of_two(p.slots_max);
	p.slots = sizeof(shmq_queue_desc);
	p.ready = round_page(p.slots + n * sizeof(shmq_slot_desc));
	p.defer = round_page(p.ready + cap * 4);
	p.requeue = round_page(p.defer + cap * 4);
	p.free = round_page(p.requeue + cap * 4);
	p.in_flight_when = round_page(p.free + cap * 4);
	p.in_flight_slot = round_page(p.in_flight_when + n * 8);
	p.deferred_when = round_page(p.in_flight_slot + n * 4);
	p.deferred_slot = round_page(p.deferred_when + n * 8);
	p.sessions = round_page(p.deferred_slot + n * 4);
	p.leases = round_page(p.sessions + SHMQ_SESSIONS * sizeof(shmq_session_desc));
	p.lease_holders = round_page(p.leases + SHMQ_LEASES * sizeof(shmq_lease_desc));
	p.latency = round_page(p.lease_holders + SHMQ_LEASE_HOLDERS * sizeof(shmq_lease_holder_desc));
	p.arena = round_page(p.latency + sizeof(shmq_latency_desc));
	p.size = round_page(p.arena + arena_max);
	return p;
}

uint64_t shmq_queue_bytes(const shmq_limits *l)
{
	return plan_queue(l->mem_queue_size, l->in_flight_slots, round_page(l->arena_size)).size;
}

/* Have the pages of the slots from `from` to n, and of their ring and heap entries. */
static int slots_commit(const shmq_map *map, uint32_t from, uint32_t n)
{
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
		{map->in_flight.when, from, n, 8},
		{map->in_flight.slot, from, n, 4},
		{map->deferred.when, from, n, 8},
		{map->deferred.slot, from, n, 4},
	};

	for (size_t i = 0; n > from && i < sizeof(part) / sizeof(part[0]); i++) {
		uint64_t at = (uint64_t)((const uint8_t *)part[i].at - map->base);
		int r = segment_commit(map->base, at + part[i].from * part[i].size,
		                       (part[i].to - part[i].from) * part[i].size);

		if (r)
			return r;
	}
	return 0;
}

int queue_commit_slots(shmq_map *map, uint32_t n)
{
	int r = slots_commit(map, ld(&map->slots_backed), n);

	if (!r && n > ld(&map->slots_backed)) {
		st(&map->slots_backed, n);
		st(&map->rings_backed, power_of_two(n) - 1);
	}
	return r;
}

int queue_ready_slots(const shmq_map *map, uint32_t n)
{
	return slots_commit(map, ld(&map->slots_backed), n);
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

bool arena_follow(shmq_map *map, uint64_t end, uint64_t committed)
{
	return end <= committed &&
	       ((committed <= map->arena_max && arena_back(map, committed)) || arena_back(map, end));
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
		r = segment_commit(map->base, (uint64_t)((uint8_t *)map->lease_holders - map->base),
		                   SHMQ_LEASE_HOLDERS * sizeof(shmq_lease_holder_desc));
	if (!r)
		st(&map->leases_backed, 1);
	return r;
}
