#include "publish/fanout.h"

#include "base/atomics.h"
#include "memory/handles.h"
#include "memory/segment.h"
#include "publish/producer.h"
#include "publish/room.h"
#include "queue/settings.h"
#include "queue/slots.h"
#include "shmq.h"
#include "sync/doorbell.h"

/* The number of READY messages above which the spiller is rung: three quarters of the budget, so
 * that it comes early. With messages on disk every new message waits for those anyway. */
static uint32_t high_water(const shmq_broker *b, const shmq_map *map)
{
	if (!b->d->limits.mem_queue_size)
		return 0;
	return ready_budget(map) / 4 * (on_disk(map->q) ? 2 : 3);
}

void extras_prepare(const extras *x, uint32_t i, shmq_slot_desc *s)
{
	uint32_t block = x->blocks ? x->blocks[i] : 0;

	s->flags = x->flags;
	if (block || x->sealed) {
		s->properties = block | (x->sealed ? SHMQ_SLOT_SEALED : 0);
		s->flags |= SHMQ_SLOT_PROPERTIES;
	}
	if (x->flags & HAS_EXPIRES)
		s->expires = x->expires;
	if (x->flags & SHMQ_SLOT_FAILED)
		/* its next delivery has another generation, so that one counts */
		st(&s->failures, (uint32_t)x->failures << 16 | (uint16_t)SHMQ_GENERATION_OF(ld(&s->word)));
}

bool fanout_overflows(shmq_broker *b, shmq_map *map, uint32_t n, bool deferred)
{
	shmq_queue_desc *q = map->q;
	uint32_t mark = high_water(b, map), ready = ready_count_cached(q, mark);
	bool over = ready > mark && ready - mark <= n; /* it was rung when the mark was passed */

	over |= ld(&q->arena_committed) == map->arena_max && q->arena.free_bytes < map->arena_max / 8;
	over |= deferred && defers_many(map);
	over &= !keeps_memory(map);
	if (over)
		spiller_note(b, map->index);
	return over;
}

static enum purpose purpose_of(const limited *l)
{
	return l->due ? FOR_DEFERRED : FOR_READY;
}

static int room(const limited *l, shmq_map *map)
{
	return l->lent ? 0 : room_for(l->p->b, map, l->lengths, l->n, purpose_of(l), l->until);
}

int limited_room(const limited *l, shmq_map *map)
{
	uint32_t overflow = settings_of(map)->overflow;
	bool oldest = overflow == SHMQ_OVERFLOW_DROP_OLDEST && !l->due;
	int r = 0;

	/* Nobody waits, and nothing is dropped, for messages that memory could never hold. */
	if (!l->lent && !l->moves)
		r = room_ever(map, l->lengths, l->n, purpose_of(l));
	/* A deferred message does not wait yet. A loan drops messages when it ends. */
	if (!r && !l->due && !(l->lends && oldest))
		r = limit_check(l->p->b, map, l->n, bytes_of(l->lengths, l->n));
	if (r == SHMQ_TOO_BIG && l->moves)
		r = ready_count_cached(map->q, 0) ? SHMQ_FULL : 0; /* it was accepted before */
	if (!r)
		r = room(l, map);
	if (r == SHMQ_FULL && oldest)
		return DROPS;
	if (r == SHMQ_FULL && overflow == SHMQ_OVERFLOW_REJECT && !l->moves) {
		bump(&map->q->rejected, 1);
		return SHMQ_REJECTED;
	}
	return r;
}

int limited_drop(const limited *l, shmq_map *map)
{
	uint32_t n = l->lends ? 0 : l->n, more = 0, dropped;
	uint64_t bytes = l->lends ? 0 : bytes_of(l->lengths, l->n);

	if (settings_of(map)->overflow != SHMQ_OVERFLOW_DROP_OLDEST)
		return 0;
	for (;;) {
		int r = drop_oldest(l->p->b, map, n, bytes, more, l->until, &dropped);

		if (!r)
			r = room(l, map);
		if (r == SHMQ_FULL && more && !dropped)
			note_lacking(l->p, map, 0, 0); /* what is in flight or came back takes all */
		else if (r == SHMQ_FULL) {
			more = more ? 2 * more : l->n; /* memory did not suffice */
			continue;
		}
		return r == SHMQ_GONE ? SHMQ_AGAIN : r;
	}
}
