/*
 * A results store's segment: making it, mapping it, and its lock.
 *
 *   a holder of the lock died   dirty = 1, the lock is made consistent; everything derived is made
 *                               again from the entries' words; dirty is cleared last
 *
 * Only the store's lock is held meanwhile. A reader holds it too, so nobody sees what a dead process
 * left. If the rebuild cannot finish, the lock stays usable and `dirty` stays set.
 */
#include "store/store_segment.h"

#include "base/atomics.h"
#include "base/bounds.h"
#include "base/killpoint.h"
#include "base/process.h"
#include "base/status.h"
#include "instance/create.h"
#include "memory/arena.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "shmq.h"
#include "store/store_table.h"
#include "sync/doorbell.h"
#include "sync/lock.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

store_plan plan_store(uint32_t max_keys, uint64_t max_bytes, uint64_t max_value)
{
	store_plan p;

	p.entries_max = max_keys + 1;
	/* Room for a value beside the one that it replaces, and for gaps. */
	p.arena_max = round_page(max_bytes + max_bytes / 8 +
	                         2 * arena_block_size(max_value + SHMQ_KEY_MOST) + SHMQ_ARENA_FIRST);
	p.buckets = sizeof(shmq_store_desc);
	p.entries = round_page(p.buckets + (uint64_t)power_of_two(p.entries_max) * sizeof(uint32_t));
	p.arena = round_page(p.entries + (uint64_t)p.entries_max * sizeof(shmq_result_desc));
	p.size = p.arena + p.arena_max;
	return p;
}

static void place(shmq_store *s, const store_plan *p)
{
	s->d = (shmq_store_desc *)(void *)s->base;
	s->buckets = (void *)(s->base + p->buckets);
	s->entries = (void *)(s->base + p->entries);
	s->arena = s->base + p->arena;
	s->entries_max = p->entries_max;
	s->arena_max = p->arena_max;
}

static void fill(shmq_store *s, const store_plan *p, const shmq_store_spec *spec)
{
	shmq_store_desc *d = s->d;

	segment_fill(&d->segment, SHMQ_SEGMENT_STORE, p->size, spec->serial, s->b->d->segment.instance);
	d->index = spec->store;
	d->max_keys = spec->max_keys;
	d->entries_max = p->entries_max;
	d->max_bytes = spec->max_bytes;
	d->max_value = s->max_value;
	d->arena_max = p->arena_max;
	d->buckets_at = p->buckets;
	d->entries_at = p->entries;
	d->arena_at = p->arena;
	random_identity(d->seed);
	strcpy(d->name, spec->name);
}

int shmq_store_create(shmq_broker *b, int fd, const shmq_store_spec *spec)
{
	shmq_store s = {.b = b, .max_value = b->d->limits.max_msg_size, .serial = spec->serial};
	store_plan p;
	uint32_t first;
	int r = shmq_store_limits_check(spec->max_keys, spec->max_bytes);

	if (r)
		return r;
	if (strlen(spec->name) >= SHMQ_NAME || spec->store >= SHMQ_STORES)
		return SHMQ_INVALID;
	error_clear();
	p = plan_store(spec->max_keys, spec->max_bytes, s.max_value);
	first = p.entries_max < SHMQ_STORE_FIRST ? p.entries_max : SHMQ_STORE_FIRST;
	r = segment_size(fd, p.size, "results store");
	if (r)
		return r;
	r = segment_map(fd, p.size, &s.base);
	if (r)
		return r;
	place(&s, &p);
	r = segment_reserve(fd, s.base, p.size, sizeof(shmq_store_desc));
	if (!r)
		r = store_back(&s, first, SHMQ_ARENA_FIRST);
	if (r)
		goto out;
	fill(&s, &p, spec);
	SHMQ_KILLPOINT("store.filled");
	r = lock_init(&s.d->lock);
	if (r)
		goto out;
	st(&s.d->entries_committed, first);
	st(&s.d->arena_committed, SHMQ_ARENA_FIRST);
	r = store_rebuild(&s);
	if (r)
		goto out;
	SHMQ_KILLPOINT("store.ready");
	st_release(&s.d->segment.ready, SHMQ_READY_STATE); /* SYNC(segment-ready) */
out:
	segment_unmap(s.base, p.size);
	return r;
}

/* Copy the fixed words of the header, and check them and everything else against the copy. */
static bool sane(shmq_store *s, store_plan *out)
{
	const shmq_store_desc *d = s->d;
	store_plan p;

	s->max_keys = d->max_keys;
	s->max_bytes = d->max_bytes;
	s->max_value = d->max_value;
	s->seed[0] = d->seed[0];
	s->seed[1] = d->seed[1];
	if (shmq_store_limits_check(s->max_keys, s->max_bytes) || s->max_value > SHMQ_ARENA_MAX)
		return false;
	*out = p = plan_store(s->max_keys, s->max_bytes, s->max_value);
	return s->size == p.size && d->entries_max == p.entries_max && d->arena_max == p.arena_max &&
	       d->buckets_at == p.buckets && d->entries_at == p.entries && d->arena_at == p.arena &&
	       d->index == s->index && d->segment.serial == s->serial &&
	       d->segment.instance[0] == s->b->d->segment.instance[0] &&
	       d->segment.instance[1] == s->b->d->segment.instance[1];
}

int shmq_store_open(shmq_broker *b, uint32_t store, uint64_t serial, int fd, shmq_store **out)
{
	store_plan plan = {0};
	shmq_store *s;
	uint64_t size;
	int r = usable_status(b);

	if (!r)
		r = segment_check(fd, SHMQ_SEGMENT_STORE, &size);
	if (r)
		return r;
	if (size < sizeof(shmq_store_desc))
		return fail(SHMQ_CORRUPT, "the results store is shorter than its header");
	s = calloc(1, sizeof(*s));
	if (!s)
		return SHMQ_NO_MEMORY;
	r = segment_map(fd, size, &s->base);
	if (r)
		goto fail;
	s->b = b;
	s->size = size;
	s->index = store;
	s->serial = serial;
	s->d = (shmq_store_desc *)(void *)s->base;
	r = segment_commit(s->base, 0, sizeof(shmq_store_desc));
	if (!r && !sane(s, &plan))
		r = fail(
				SHMQ_CORRUPT,
				"results store %llu: its header cannot be right, or it belongs to another instance",
				(unsigned long long)serial);
	if (r)
		goto unmap;
	place(s, &plan);
	broker_hold(b);
	*out = s;
	return 0;
unmap:
	segment_unmap(s->base, size);
fail:
	free(s);
	return r;
}

void shmq_store_close(shmq_store *s)
{
	shmq_broker *b = s->b;

	segment_unmap(s->base, s->size);
	free(s);
	broker_release(b);
}

/* ---- the lock ---- */

/* Returns true if the words that say how much is committed can be true, and if what they claim has
 * pages. Under the lock. */
static bool words_in(shmq_store *s)
{
	uint32_t entries = ld(&s->d->entries_committed); /* SYNC(store-committed) */
	uint64_t arena = ld(&s->d->arena_committed);     /* SYNC(store-committed) */

	/* A handle that has backed nothing yet must not believe words of 0. */
	if (s->entries_backed && s->arena_backed && entries == s->entries_backed &&
	    arena == s->arena_backed)
		return true;
	if (!TRUST_CHECK(entries - 1 < s->entries_max && entries >= s->entries_backed &&
	                 arena <= s->arena_max && arena >= SHMQ_ARENA_FIRST &&
	                 arena % SHMQ_ARENA_UNIT == 0))
		return false;
	if (arena < s->arena_backed)
		s->arena_backed = arena; /* its end was given back */
	return !store_back(s, entries, arena);
}

int store_lock(shmq_store *s, int64_t until)
{
	int r = usable_status(s->b);

	if (!r)
		r = lock_take(&s->d->lock, until);
	if (r == SHMQ_LOCK_DIED) {
		st(&s->d->dirty, 1);
		SHMQ_KILLPOINT("store_lock.dirty");
		lock_consistent(&s->d->lock);
		r = 0;
	}
	if (r)
		return r;
	if (ld(&s->d->segment.ready) != SHMQ_READY_STATE && !s->retired)
		r = SHMQ_GONE;
	else if (!words_in(s))
		r = fail(
				SHMQ_CORRUPT,
				"results store %llu: something has overwritten its header, or /dev/shm has no room "
				"for it; delete the store",
				(unsigned long long)s->serial);
	else if (ld(&s->d->dirty)) /* SYNC(store-dirty) */
		r = store_rebuild(s);
	if (r)
		store_unlock(s);
	return r;
}

void store_unlock(shmq_store *s)
{
	lock_drop(&s->d->lock);
}

void store_wake(shmq_store *s, uint32_t stripe)
{
	wait_wake(s->b, &s->d->stripes[stripe].waiters, WAKE_ALL);
}

void store_wake_all(shmq_store *s)
{
	for (uint32_t i = 0; i < SHMQ_STORE_STRIPES; i++)
		store_wake(s, i);
}

/* ---- the end ---- */

int shmq_store_retire(shmq_store *s, int64_t until)
{
	int r = store_lock(s, until);

	if (r && r != SHMQ_CORRUPT)
		return r;
	s->retired = true;
	st_release(&s->d->segment.ready, SHMQ_CLOSED_STATE); /* SYNC(segment-ready) */
	for (uint32_t i = 0; i < SHMQ_STORE_STRIPES; i++)
		store_noted(s, i);
	if (!r)
		store_unlock(s);
	store_wake_all(s);
	return r;
}

int shmq_store_reopen(int fd)
{
	shmq_segment_desc head;
	uint32_t ready = SHMQ_READY_STATE;

	error_clear();
	if (pread(fd, &head, sizeof(head), 0) != (ssize_t)sizeof(head) || head.magic != SHMQ_MAGIC ||
	    head.layout_version != SHMQ_LAYOUT_VERSION ||
	    head.fingerprint != shmq_layout_fingerprint() || head.kind != SHMQ_SEGMENT_STORE)
		return fail(SHMQ_LAYOUT, "it is no results store of this version");
	if (head.ready != SHMQ_CLOSED_STATE)
		return 0;
	return pwrite(fd, &ready, sizeof(ready), (off_t)offsetof(shmq_segment_desc, ready)) ==
	                       (ssize_t)sizeof(ready)
				   ? 0
				   : fail(SHMQ_LAYOUT, "opening it again: %s", strerror(errno));
}
