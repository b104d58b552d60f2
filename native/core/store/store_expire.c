/*
 * Removing what has expired, in steps; and giving idle memory back. The supervisor does both.
 *
 * `next_expiry` is a lower bound: a set lowers it, the end of a sweep stores the earliest time that
 * the sweep has seen and that was stored meanwhile. Before it nothing needs to be looked at.
 * death: a rebuild finds the bound again, and the sweep begins anew.
 */
#include "base/atomics.h"
#include "base/killpoint.h"
#include "memory/arena.h"
#include "memory/segment.h"
#include "store/store_segment.h"
#include "store/store_table.h"

static void sweep(shmq_store *s, int64_t now, uint32_t limit, uint32_t *expired, bool *more)
{
	shmq_store_desc *d = s->d;
	uint32_t n = s->entries_backed, at = at_most(once(d->sweep_at), n);
	bool whole = true;

	if (!at)
		d->sweep_earliest = INT64_MAX;
	for (; at < n && limit--; at++) {
		shmq_result_desc *e = &s->entries[at];

		if (!ld(&e->word))
			continue;
		if (e->expires <= now) {
			whole = store_expire(s, at) && whole;
			++*expired;
		} else if (e->expires < d->sweep_earliest) {
			d->sweep_earliest = e->expires;
		}
	}
	if (!whole) {
		(void)store_rebuild(s);
		return;
	}
	*more = at < n;
	if (!*more)
		st(&d->next_expiry, d->sweep_earliest);
	d->sweep_at = *more ? at : 0;
}

int shmq_store_sweep(shmq_store *s, int64_t now, uint32_t limit, int64_t until, uint32_t *expired,
                     bool *more)
{
	int r;

	*expired = 0;
	*more = false;
	if (ld(&s->d->next_expiry) > now)
		return 0;
	r = store_lock(s, until);
	if (r)
		return r;
	sweep(s, now, limit, expired, more);
	store_unlock(s);
	return 0;
}

/* The smallest size of the arena that contains all values. */
static uint64_t arena_needed(const shmq_store *s)
{
	uint64_t end = 0, page = round_page(1);

	for (uint32_t i = 0; i < s->entries_backed; i++) {
		const shmq_result_desc *e = &s->entries[i];
		uint64_t last = e->body + e->capacity;

		if (ld(&e->word) && last > end)
			end = last;
	}
	end = (end + SHMQ_ARENA_UNIT + page - 1) / page * page; /* the sentinel follows it */
	return end > SHMQ_ARENA_FIRST ? end : SHMQ_ARENA_FIRST;
}

int shmq_store_trim(shmq_store *s, int64_t until, uint64_t *bytes)
{
	uint64_t had, keep, arena = (uint64_t)(s->arena - s->base);
	int r = store_lock(s, until);

	*bytes = 0;
	if (r)
		return r;
	had = ld(&s->d->arena_committed);
	keep = arena_needed(s);
	if (keep < had) {
		st(&s->d->dirty, 1);
		SHMQ_KILLPOINT("store_trim.dirty");
		st_release(&s->d->arena_committed, keep); /* SYNC(store-committed) */
		SHMQ_KILLPOINT("store_trim.lowered");
		r = store_rebuild(s);
	}
	if (!r) {
		*bytes = keep < had ? had - keep : 0;
		s->arena_backed = keep < had ? keep : had;
		segment_punch(s->base, arena + s->arena_backed, arena + s->arena_max);
		SHMQ_KILLPOINT("store_trim.punched");
	}
	store_unlock(s);
	return r;
}
