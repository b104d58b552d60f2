/*
 * Giving idle memory back: the end of the arena that no message uses goes back to the system.
 *
 * Under both locks: `dirty`, then the lower arena_committed, a rebuild; then, under the publish lock
 * alone and in pieces, the pages.
 * death before the pages have gone: the next locker rebuilds, and the pages go back next time.
 */
#include "base/atomics.h"
#include "base/killpoint.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "queue/locking.h"
#include "queue/rebuild.h"
#include "queue/slots.h"
#include "shmq.h"
#include "shmq_supervisor.h"

/* The smallest size of the arena that contains all bodies of slots in use. */
static uint64_t arena_needed(shmq_map *map)
{
	uint32_t n = slots_of(map);
	uint64_t end = 0, page = round_page(1);

	for (uint32_t i = 0; i < n; i++) {
		const shmq_slot_desc *s = &map->slots[i];
		uint64_t last = s->body + s->capacity;

		if (SHMQ_STATE_OF(ld(&s->word)) != SHMQ_FREE && s->capacity && last > end)
			end = last;
	}
	if (!end)
		return SHMQ_ARENA_FIRST;
	end = (end + SHMQ_ARENA_UNIT + page - 1) / page * page; /* the sentinel follows it */
	return end > SHMQ_ARENA_FIRST ? end : SHMQ_ARENA_FIRST;
}

/* How much is punched under one hold of the publish lock, so that no publisher waits long. */
#define PIECE (UINT64_C(8) << 20)

/* Punch the arena from `keep` on, from its end downwards. P is held, which keeps the arena from
 * growing, and is released between two pieces: a publisher may let it grow then, and what is left
 * stays until the next time. P is held afterwards if this returns 0. */
static int punch(shmq_broker *b, shmq_map *map, uint64_t keep, uint64_t end, int64_t until)
{
	uint64_t arena = (uint64_t)(map->arena - map->base);

	for (;;) {
		uint64_t from = end > keep + PIECE ? end - PIECE : keep;
		int r;

		segment_punch(map->base, arena + from, arena + end);
		SHMQ_KILLPOINT("trim.punched");
		if (from == keep)
			return 0;
		end = from;
		topic_unlock(topic_of(b, map));
		r = topic_lock(b, topic_of(b, map), until);
		if (r || ld(&map->q->arena_committed) != keep)
			return r;
	}
}

int shmq_trim(shmq_broker *b, uint32_t queue, int64_t until, uint64_t *bytes)
{
	uint64_t had, keep;
	shmq_map *map;
	int r;

	*bytes = 0;
	r = both_enter(b, queue, until, &map);
	if (r)
		return r;
	had = arena_of(map);
	keep = arena_needed(map);
	if (keep < had) {
		st(&map->q->dirty, 1);
		SHMQ_KILLPOINT("trim.dirty");
		st_release(&map->q->arena_committed, keep); /* SYNC(arena-committed) */
		SHMQ_KILLPOINT("trim.lowered");
		r = queue_rebuild(b, map, false);
		*bytes = had - keep;
	}
	if (!r)
		st(&map->arena_backed, keep < had ? keep : had);
	queue_unlock(map);
	if (r || !punch(b, map, keep < had ? keep : had, map->arena_max, until))
		topic_unlock(topic_of(b, map));
	map_release(map);
	return r;
}
