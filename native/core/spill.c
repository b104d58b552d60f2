/*
 * Overflow: memory to disk and back, empty. The files themselves are the supervisor's; here are the
 * slots and the two commit words (disk_write, disk_read; file << 40 | offset).
 *
 *   spill    READY (RETURNED: BACK) -> SPILLING(pos not known: none), written outside the locks, then under D the
 *            positions, then disk_write, then FREE. Below disk_write: on disk. Above: in memory.
 *   ahead    INFLIGHT, BACK -> RESTORED(pos in front of disk_read) under D, written outside the locks
 *            where all has been read, then disk_read, then FREE. Below disk_read: in memory.
 *   restore  under P and D: RESTORED(pos) with its order, then disk_read, then BACK.
 *   empty    under P and D: states to FREE, disk_read = disk_write, rebuild.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

int shmq_advance(shmq_broker *b, uint32_t queue, uint32_t n, int64_t until, uint32_t *moved)
{
	shmq_map *map;
	shmq_queue_desc *q;
	int r = map_get(b, queue, &map);

	*moved = 0;
	if (r)
		return r;
	touch(b, queue);
	r = queue_lock(b, map, until);
	if (r)
		goto out;
	q = map->q;
	defer_drain(b, map); /* into `held` */
	while (*moved < n && ld(&q->ready_head) != ld_acquire(&q->ready_tail) &&
	       ld(&q->held) < map->inflight_slots) {
		uint32_t head = ld(&q->ready_head), slot = map->ready[head & ring_mask_of(map)];

		if (!slot_is(map, slot, SHMQ_READY)) {
			queue_broken(map);
			break;
		}
		slot_back(map, slot, 0);
		SHMQ_KILLPOINT("advance.back");
		st_release(&q->ready_head, head + 1);
		held_add(map, slot);
		++*moved;
	}
	st(&q->overflowed, 1);
	queue_unlock(map);
	wake_takers(b, map, 1);
	wake_space(b, map);
out:
	map_release(map);
	return r;
}

/* ---- spill ---- */

static bool spill_add(shmq_map *map, shmq_spill *out, uint32_t n, uint64_t max_bytes, uint32_t slot,
                      unsigned previous)
{
	shmq_slot_desc *s = &map->slots[slot];
	uint32_t length;
	span at;

	if (!slot_is(map, slot, previous) || !body_in(map, s, &at)) {
		queue_broken(map);
		return false;
	}
	length = at.length + RECORD_HEAD;
	if (out->count == n || (out->count && out->bytes + length > max_bytes))
		return false;
	if (!SHMQ_PLANTED(4))
		s->pos = SHMQ_NO_POSITION;
	s->previous = (uint16_t)previous;
	SHMQ_KILLPOINT("spill.fields");
	st_release(&s->word, word_next(ld(&s->word), SHMQ_SPILLING));
	SHMQ_KILLPOINT("spill.state");
	bump(&map->q->spilling_count, 1);
	out->slots[out->count] = slot;
	out->lengths[out->count] = length;
	out->bytes += length;
	out->count++;
	return true;
}

static void spill_ready(shmq_map *map, shmq_spill *out, uint32_t n, uint64_t max_bytes)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->ready_head), tail = ld_acquire(&q->ready_tail);

	for (; head != tail; head++) {
		uint32_t slot = map->ready[head & ring_mask_of(map)];

		if (!spill_add(map, out, n, max_bytes, slot, SHMQ_READY))
			break;
		st_release(&q->ready_head, head + 1);
		SHMQ_KILLPOINT("spill.head");
	}
}

/* What is in flight, by delivery, to the requeue ring behind `tail`, which is scratch space. */
static bool gather_inflight(shmq_map *map, uint32_t tail, uint32_t n)
{
	uint32_t mask = ring_mask_of(map);

	for (uint32_t i = 0; i < n; i++) {
		uint32_t slot = map->inflight.slot[i];

		if (!slot_is(map, slot, SHMQ_INFLIGHT) || !body_is_in(map, &map->slots[slot])) {
			queue_broken(map);
			return false;
		}
		map->requeue[(tail + i) & mask] = slot;
	}
	sort_slots(map->requeue, mask, tail, n, map->slots, by_delivery);
	return true;
}

/* Flush: in flight (the oldest), the requeue ring, the ready ring. */
static void spill_all(shmq_broker *b, shmq_map *map, shmq_spill *out, uint32_t n,
                      uint64_t max_bytes)
{
	shmq_queue_desc *q = map->q;
	uint32_t inflight = at_most(ld(&q->inflight_len), slots_of(map)), mask = ring_mask_of(map), tail;

	defer_drain(b, map);
	tail = ld(&q->requeue_tail);
	if (!gather_inflight(map, tail, inflight))
		return;
	for (uint32_t i = 0; i < inflight; i++) {
		uint32_t slot = slot_in(map, &map->requeue[(tail + i) & mask]);
		shmq_session_desc *its = session_of(map, &map->slots[slot]);

		if (!spill_add(map, out, n, max_bytes, slot, SHMQ_INFLIGHT))
			return;
		heap_remove(&map->inflight, slot);
		held_remove(map, slot);
		if (its)
			session_leave(its);
	}
	while (ld(&q->requeue_head) != ld(&q->requeue_tail)) {
		uint32_t slot = map->requeue[ld(&q->requeue_head) & mask];

		if (!spill_add(map, out, n, max_bytes, slot, SHMQ_BACK))
			return;
		st_release(&q->requeue_head, ld(&q->requeue_head) + 1);
		held_remove(map, slot);
	}
	spill_ready(map, out, n, max_bytes);
}

/* Waits for others, or (OUT) was handed out before: has no turn to keep. */
static bool may_wait(const shmq_slot_desc *s, const shmq_spill *out)
{
	return s->after || (out->from == SHMQ_SPILL_OUT && s->attempts);
}

/* The youngest of those in the requeue ring; the rest of it closes up. */
static void spill_returned(shmq_map *map, shmq_spill *out, uint32_t n, uint64_t max_bytes)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->requeue_head), tail = ld(&q->requeue_tail), mask = ring_mask_of(map);
	uint32_t first = tail, chosen = 0, to;
	uint64_t bytes = 0;

	for (uint32_t at = tail; at != head && chosen < n; at--) {
		shmq_slot_desc *s = &map->slots[map->requeue[(at - 1) & mask]];
		uint32_t length;

		if (!slot_is(map, map->requeue[(at - 1) & mask], SHMQ_BACK)) {
			queue_broken(map);
			return;
		}
		length = s->length + RECORD_HEAD;
		if (!may_wait(s, out))
			continue;
		if (chosen && bytes + length > max_bytes)
			break;
		bytes += length;
		chosen++;
		first = at - 1;
	}
	for (uint32_t at = to = first; at != tail; at++) {
		uint32_t slot = map->requeue[at & mask];

		if (may_wait(&map->slots[slot], out) &&
		    spill_add(map, out, chosen, UINT64_MAX, slot, SHMQ_BACK))
			held_remove(map, slot);
		else
			map->requeue[to++ & mask] = slot;
	}
	st_release(&q->requeue_tail, to);
	requeue_firsts_find(map);
}

/* ---- ahead ---- */

static bool was_never_out(const shmq_slot_desc *s)
{
	return !s->attempts && !s->after;
}

static int by_turn(const shmq_slot_desc *x, const shmq_slot_desc *y)
{
	int difference = was_never_out(x) - was_never_out(y);

	return difference ? difference : by_order(x, y);
}

/*
 * In the requeue ring, who was never handed out goes behind who was: these are what the files hold
 * right before the read position, so they can go back there, and in the order of publishing. Those
 * before them have no turn to keep.
 */
static bool keep_turns(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->requeue_head), tail = ld(&q->requeue_tail), mask = ring_mask_of(map);
	uint64_t order = ld(&q->order);
	bool sane = SANE(tail - head <= slots_of(map));

	for (uint32_t at = head; sane && at != tail; at++) {
		uint32_t slot = map->requeue[at & mask];

		sane = slot_is(map, slot, SHMQ_BACK) && body_is_in(map, &map->slots[slot]);
	}
	if (!sane) {
		queue_broken(map);
		return false;
	}
	sort_slots(map->requeue, mask, head, tail - head, map->slots, by_turn);
	st(&q->order, order + (tail - head));
	/* The youngest first: wherever this ends, they are in the order of publishing. */
	for (uint32_t at = tail; at != head; at--) {
		shmq_slot_desc *s = &map->slots[map->requeue[(at - 1) & mask]];

		if (!was_never_out(s))
			break;
		s->order = order + (at - head);
	}
	requeue_firsts_find(map);
	return true;
}

static void ahead_mark(shmq_slot_desc *s, unsigned previous, uint64_t order, uint64_t pos)
{
	s->order = order; /* if they are given back */
	s->after = 0;
	s->pos = pos;
	s->previous = (uint16_t)previous;
	SHMQ_KILLPOINT("ahead.fields");
	st_release(&s->word, word_next(ld(&s->word), SHMQ_RESTORED));
	SHMQ_KILLPOINT("ahead.state");
}

/*
 * AHEAD: what is in flight by delivery, then the requeue ring: that is the order of delivery.
 * FRONT: of the ring those at its end that wait for nobody. Who was never handed out has a turn and is
 * always among the youngest, so what does not fit, or waits for others, may stay and come before them.
 */
static int ahead_begin(shmq_map *map, uint32_t n, shmq_spill *out)
{
	bool live = out->from == SHMQ_SPILL_FRONT;
	shmq_queue_desc *q = map->q;
	uint32_t inflight = live ? 0 : at_most(ld(&q->inflight_len), slots_of(map));
	uint32_t head = ld(&q->requeue_head), tail = ld(&q->requeue_tail), first, all;
	uint32_t mask = ring_mask_of(map);
	uint64_t read = ld(&q->disk_read), before = read & ((UINT64_C(1) << 40) - 1), bytes = 0;
	uint64_t order;

	first = all = inflight + (tail - head);
	if ((!live && read == ld(&q->disk_write)) || !all)
		return SHMQ_EMPTY;
	if (!SANE(all <= slots_of(map))) {
		queue_broken(map);
		return SHMQ_EMPTY;
	}
	if (!keep_turns(map) || !gather_inflight(map, tail, inflight))
		return SHMQ_EMPTY;
	order = ld(&q->order);
#define NTH(i)                                                                                     \
	slot_in(map, &map->requeue[((i) < inflight ? tail + (i) : head + (i) - inflight) & mask])
	for (; first && all - first < n; first--) {
		uint64_t length = map->slots[NTH(first - 1)].length + RECORD_HEAD;

		if ((before && bytes + length > before) || (live && map->slots[NTH(first - 1)].after))
			break;
		bytes += length;
	}
	if (!read || first == all || (!live && first && (bytes != before || !(read >> 40))))
		return SHMQ_FULL;
	out->position = before ? read - bytes : read - SHMQ_POS(1, 0);
	st(&q->order, order + (all - first));
	out->count = all - first;
	out->bytes = bytes;
	/* The youngest first: whenever this ends, those that are not marked yet go before it. */
	for (uint32_t i = all; i-- > first;) {
		shmq_slot_desc *s = &map->slots[NTH(i)];
		uint32_t length = s->length + RECORD_HEAD;

		bytes -= length;
		out->slots[i - first] = NTH(i);
		out->lengths[i - first] = length;
		ahead_mark(s, i < inflight ? SHMQ_INFLIGHT : SHMQ_BACK, order + 1 + (i - first),
		           out->position + bytes);
	}
	for (uint32_t i = first; i < all; i++) {
		uint32_t slot = NTH(i);
		shmq_session_desc *its = session_of(map, &map->slots[slot]);

		held_remove(map, slot);
		if (i >= inflight)
			continue;
		heap_remove(&map->inflight, slot);
		if (its)
			session_leave(its);
	}
	st_release(&q->requeue_tail, first < inflight ? head : head + first - inflight);
	requeue_firsts_find(map);
#undef NTH
	return 0;
}

/* D held. */
static int spill_some(shmq_broker *b, shmq_map *map, enum shmq_spill_from from, uint32_t n,
                      uint64_t max_bytes, shmq_spill *out)
{
	if (ld(&map->q->base_pending))
		return SHMQ_EMPTY; /* its files still bear another name */
	if (from == SHMQ_SPILL_AHEAD || from == SHMQ_SPILL_ALL)
		lease_return_all(map);
	if (from == SHMQ_SPILL_AHEAD)
		return ahead_begin(map, n, out);
	if (from == SHMQ_SPILL_FRONT && lease_has_run(map))
		return SHMQ_EMPTY; /* it begins where the read position is */
	st(&map->q->spilling, 1); /* counts as "on disk": what is READY behind it waits */
	SHMQ_KILLPOINT("spill.flag");
	if (from == SHMQ_SPILL_FRONT)
		(void)ahead_begin(map, n, out);
	else if (from == SHMQ_SPILL_ALL)
		spill_all(b, map, out, n, max_bytes);
	else if (from == SHMQ_SPILL_RETURNED || from == SHMQ_SPILL_OUT)
		spill_returned(map, out, n, max_bytes);
	else
		spill_ready(map, out, n, max_bytes);
	if (out->count)
		return 0;
	st(&map->q->spilling, 0);
	return SHMQ_EMPTY;
}

int shmq_spill_begin(shmq_broker *b, uint32_t queue, enum shmq_spill_from from, uint32_t n,
                     uint64_t max_bytes, int64_t until, shmq_spill *out)
{
	shmq_map *map;
	int r = map_get(b, queue, &map);

	if (r)
		return r;
	touch(b, queue);
	out->queue = queue;
	out->from = from;
	out->count = 0;
	out->bytes = 0;
	for (bool repaired = false;; repaired = true) {
		bool broken;

		r = queue_lock(b, map, until);
		if (r)
			break;
		r = spill_some(b, map, from, n, max_bytes, out);
		broken = !out->count && ld(&map->q->dirty);
		queue_unlock(map);
		if (!broken)
			break;
		if (repaired) {
			r = queue_corrupt(map);
			break;
		}
	}
	map_release(map);
	return r;
}

int shmq_spill_encode(shmq_broker *b, const shmq_spill *s, void *buffer)
{
	shmq_map *map;
	uint8_t *at = buffer;
	int r = map_get(b, s->queue, &map);

	if (r)
		return r;
	for (uint32_t i = 0; i < s->count; i++) {
		/* Of a SPILLING slot a rebuild beside us writes `heap` and `pins`; these are still. */
		const shmq_slot_desc *from = &map->slots[s->slots[i]];
		shmq_slot_desc slot = {.id = from->id,
		                       .timestamp = from->timestamp,
		                       .body = once(from->body),
		                       .length = s->lengths[i] - RECORD_HEAD,
		                       .attempts = from->attempts};

		/* Emptied and reused meanwhile: the batch will be abandoned; stay inside its record. */
		if (!SANE(slot.length <= map->arena_max && slot.body <= map->arena_max - slot.length))
			slot.body = 0;
		record_write(at, &slot, map->arena + slot.body);
		at += s->lengths[i];
	}
	map_release(map);
	return 0;
}

/* The slots go back to what they were; the rings are rebuilt. P and D held. */
static void spill_undo(shmq_broker *b, shmq_map *map, const shmq_spill *s)
{
	for (uint32_t i = 0; i < s->count; i++) {
		shmq_slot_desc *slot = &map->slots[s->slots[i]];
		uint64_t word = ld(&slot->word);

		if (SHMQ_STATE_OF(word) != SHMQ_SPILLING)
			continue;
		slot->pos = SHMQ_NO_POSITION;
		if (slot->previous == SHMQ_INFLIGHT) {
			slot->order = slot->move;
			slot->after = 0;
			slot->previous = SHMQ_BACK;
		}
		st_release(&slot->word, word_next(word, previous_of(slot)));
	}
	st(&map->q->spilling, 0);
	queue_rebuild(b, map, false);
}

/* Then what is READY may be taken again: who waits is to be woken, after D. */
bool disk_is_empty(shmq_queue_desc *q)
{
	if (on_disk(q))
		return false;
	st(&q->overflowed, 0);
	st(&q->disk_depth, 0);
	return true;
}

/* P and D held. */
static void ahead_undo(shmq_broker *b, shmq_map *map, const shmq_spill *s)
{
	for (uint32_t i = 0; i < s->count; i++) {
		shmq_slot_desc *slot = &map->slots[s->slots[i]];
		uint64_t word = ld(&slot->word);

		if (SHMQ_STATE_OF(word) == SHMQ_RESTORED)
			st_release(&slot->word, word_next(word, SHMQ_BACK));
	}
	if (s->from == SHMQ_SPILL_FRONT)
		st(&map->q->spilling, 0);
	queue_rebuild(b, map, false);
}

static int ahead_end(shmq_broker *b, shmq_map *map, const shmq_spill *s, bool ok, int64_t until)
{
	bool live = s->from == SHMQ_SPILL_FRONT, whole = true;
	shmq_queue_desc *q = map->q;
	int r = ok ? queue_lock(b, map, until) : both_lock(b, map, until);

	if (r)
		return r;
	/* A repair beside us has made them BACK, or somebody emptied the queue. */
	for (uint32_t i = 0; i < s->count; i++)
		whole &= SHMQ_STATE_OF(ld(&map->slots[s->slots[i]].word)) == SHMQ_RESTORED;
	whole &= !(live && lease_has_run(map)); /* since the batch was begun; it stays where it is */
	if (ok && !whole) {
		queue_unlock(map);
		r = both_lock(b, map, until);
		if (r)
			return r;
	}
	if (!ok || !whole) {
		ahead_undo(b, map, s);
		both_unlock(b, map);
		if (live)
			wake_takers(b, map, WAKE_ALL);
		return ok ? SHMQ_GONE : 0;
	}
	if (lease_has_run(map))
		lease_return_all(map); /* taken since the batch was begun; it would end up behind it */
	st_release(&q->disk_read, s->position);
	SHMQ_KILLPOINT("ahead.committed");
	bump(&q->disk_depth, s->count);
	bump(&q->spilled, s->count);
	for (uint32_t i = 0; i < s->count; i++) {
		slot_release(map, s->slots[i]);
		SHMQ_KILLPOINT("ahead.freed");
	}
	if (live)
		st_release(&q->spilling, 0);
	queue_unlock(map);
	wait_wake(b, &q->space, WAKE_ALL);
	if (live)
		wake_takers(b, map, 1); /* who came meanwhile saw neither these nor, maybe, the disk */
	return 0;
}

int shmq_spill_end(shmq_broker *b, const shmq_spill *s, uint64_t write_position, bool ok,
                   int64_t until)
{
	shmq_map *map;
	shmq_queue_desc *q;
	bool whole = true;
	int r;

	if (s->from == SHMQ_SPILL_CHUNK)
		return chunk_end(b, s, ok, until);
	r = map_get(b, s->queue, &map);
	if (r)
		return r;
	if (s->from == SHMQ_SPILL_AHEAD || s->from == SHMQ_SPILL_FRONT) {
		r = ahead_end(b, map, s, ok, until);
		goto out;
	}
	q = map->q;
	/* Giving back means a rebuild, and that takes P as well. */
	r = ok ? queue_lock(b, map, until) : both_lock(b, map, until);
	if (r)
		goto out;
	for (uint32_t i = 0; i < s->count; i++)
		whole &= SHMQ_STATE_OF(ld(&map->slots[s->slots[i]].word)) == SHMQ_SPILLING;
	if (ok && !whole) {
		/* Emptied. What is still SPILLING (who emptied it died half-way) goes back. */
		queue_unlock(map);
		r = both_lock(b, map, until);
		if (r)
			goto out;
		spill_undo(b, map, s);
		disk_is_empty(q);
		both_unlock(b, map);
		r = SHMQ_GONE;
		goto out;
	}
	if (!ok) {
		spill_undo(b, map, s);
		both_unlock(b, map);
		goto out;
	}
	for (uint32_t i = 0; i < s->count; i++)
		map->slots[s->slots[i]].pos = s->positions[i];
	SHMQ_KILLPOINT("spill.positions");
	st_release(&q->disk_write, write_position);
	SHMQ_KILLPOINT("spill.committed");
	bump(&q->disk_depth, s->count);
	bump(&q->spilled, s->count);
	for (uint32_t i = 0; i < s->count; i++) {
		slot_release(map, s->slots[i]);
		SHMQ_KILLPOINT("spill.freed");
	}
	st(&q->spilling_count, ld(&q->spilling_count) - s->count);
	st_release(&q->spilling, 0);
	queue_unlock(map);
	wait_wake(b, &q->space, WAKE_ALL);
out:
	map_release(map);
	return r;
}

/* ---- restore ---- */

int restore_room(shmq_broker *b, shmq_map *map, const uint64_t *lengths, uint32_t *n, int64_t until)
{
	for (;;) {
		int r = *n ? queue_room(b, map, lengths, *n, until) : SHMQ_EMPTY;

		if (r != SHMQ_FULL && r != SHMQ_TOO_BIG)
			return r;
		*n /= 2;
	}
}

static int restore_some(shmq_map *map, const uint8_t *data, uint64_t length,
                        const uint64_t *lengths, uint32_t n, uint64_t position,
                        uint64_t next_position, uint64_t *used)
{
	shmq_queue_desc *q = map->q;
	uint32_t mask = ring_mask_of(map), tail = ld(&q->requeue_tail);
	uint64_t order = ld(&q->order);
	uint8_t *body;

	if (ld(&q->disk_read) != position || lease_has_run(map))
		return SHMQ_GONE;
	for (uint32_t i = 0; i < n; i++) /* a repair on the way here may have taken the bodies back */
		if (!free_slot_for(map, i, lengths[i], &body))
			return SHMQ_AGAIN;
	st(&q->order, order + n);
	for (uint32_t i = 0; i < n; i++) {
		shmq_slot_desc *s = free_slot_for(map, i, lengths[i], &body);
		record rec;
		uint64_t size;

		if (!s) { /* the free ring names one twice */
			queue_broken(map);
			return SHMQ_AGAIN;
		}
		(void)record_read(data + *used, length - *used, UINT32_MAX, &rec, &size);
		record_place(s, body, &rec);
		s->order = order + 1 + i;
		s->deadline = 0;
		s->previous = SHMQ_FREE;
		s->pos = position + *used;
		SHMQ_KILLPOINT("restore.fields");
		st_release(&s->word, word_next(ld(&s->word), SHMQ_RESTORED));
		SHMQ_KILLPOINT("restore.state");
		*used += size;
	}
	if (!SHMQ_PLANTED(5))
		st_release(&q->disk_read, *used == length ? next_position : position + *used);
	SHMQ_KILLPOINT("restore.committed");
	for (uint32_t i = 0; i < n; i++) {
		uint32_t slot = free_slot(map, i);
		shmq_slot_desc *s = &map->slots[slot];

		if (!slot_is(map, slot, SHMQ_RESTORED)) {
			queue_broken(map);
			continue;
		}
		st_release(&s->word, word_next(ld(&s->word), SHMQ_BACK));
		SHMQ_KILLPOINT("restore.back");
		map->requeue[(tail + i) & mask] = slot;
		held_add(map, slot);
	}
	if (SHMQ_PLANTED(5))
		st_release(&q->disk_read, *used == length ? next_position : position + *used);
	st_release(&q->free_head, ld(&q->free_head) + n);
	SHMQ_KILLPOINT("restore.head");
	q->requeue_firsts = tail + n;
	st_release(&q->requeue_tail, tail + n);
	st(&q->disk_depth, ld(&q->disk_depth) > n ? ld(&q->disk_depth) - n : 0);
	bump(&q->restored, n);
	return 0;
}

int shmq_restore(shmq_broker *b, uint32_t queue, const void *data, uint64_t length,
                 uint64_t position, uint64_t next_position, int64_t until, uint32_t *taken,
                 uint64_t *used)
{
	uint64_t *lengths = malloc((length / RECORD_HEAD + 1) * sizeof(uint64_t)), at = 0, size;
	shmq_topic_desc *t;
	shmq_map *map = NULL;
	uint32_t n = 0;
	bool emptied = false;
	int r = lengths ? map_get(b, queue, &map) : SHMQ_NO_MEMORY;

	*taken = 0;
	*used = 0;
	if (r)
		goto out;
	touch(b, queue);
	while (at < length &&
	       record_size((const uint8_t *)data + at, length - at, UINT32_MAX, &size) > 0) {
		lengths[n++] = size - RECORD_HEAD;
		at += size;
	}
	if (at != length) {
		r = because(SHMQ_INVALID, "restore takes whole records only");
		goto out;
	}
	t = topic_of(b, map);
	r = topic_lock(b, t, until);
	if (r)
		goto out;
	r = restore_room(b, map, lengths, &n, until);
	if (!r)
		r = queue_lock_under(b, map, until);
	if (!r) {
		r = restore_some(map, data, length, lengths, n, position, next_position, used);
		emptied = !r && disk_is_empty(map->q);
		queue_unlock(map);
	}
	topic_unlock(t);
	if (r == SHMQ_EMPTY)
		r = 0;
	else if (!r) {
		*taken = n;
		wake_takers(b, map, emptied ? WAKE_ALL : n);
	} else {
		*used = 0;
	}
out:
	map_release(map);
	free(lengths);
	return r;
}

int shmq_disk_set(shmq_broker *b, uint32_t queue, uint64_t from, uint64_t read_position,
                  uint64_t depth, int64_t until)
{
	shmq_map *map;
	bool emptied;
	int r = map_get(b, queue, &map);

	if (r)
		return r;
	r = queue_lock(b, map, until);
	if (r)
		goto out;
	if (ld(&map->q->disk_read) != from || lease_has_run(map)) {
		r = SHMQ_GONE;
	} else {
		st(&map->q->disk_depth, depth);
		/* damage at the very end of the write file moves both positions behind it */
		if (read_position > ld(&map->q->disk_write))
			st_release(&map->q->disk_write, read_position);
		st_release(&map->q->disk_read, read_position);
	}
	emptied = disk_is_empty(map->q);
	queue_unlock(map);
	if (emptied)
		wake_takers(b, map, WAKE_ALL);
out:
	map_release(map);
	return r;
}

int shmq_disk_adopt(shmq_broker *b, uint32_t queue, uint64_t read_position, uint64_t write_position,
                    uint64_t depth, uint64_t chunk, int64_t until)
{
	shmq_map *map;
	shmq_queue_desc *q;
	int r = map_get(b, queue, &map);

	if (r)
		return r;
	r = both_lock(b, map, until);
	if (r)
		goto out;
	q = map->q;
	for (uint32_t i = 0; i < slots_of(map); i++)
		if (slot_is(map, i, SHMQ_BACK))
			map->slots[i].pos = SHMQ_NO_POSITION;
	st(&q->deferred_gone, 0);
	st(&q->deferred_read, 0);
	st_release(&q->deferred_write, chunk);
	st(&q->disk_depth, depth);
	st_release(&q->disk_write, write_position);
	st_release(&q->disk_read, read_position);
	disk_is_empty(q);
	both_unlock(b, map);
	wake_takers(b, map, WAKE_ALL);
out:
	map_release(map);
	return r;
}

int shmq_unrestore(shmq_broker *b, uint32_t queue, int64_t until, uint32_t *count)
{
	shmq_map *map;
	shmq_queue_desc *q;
	uint32_t mask, head, at;
	uint64_t position;
	int r = map_get(b, queue, &map);

	*count = 0;
	if (r)
		return r;
	r = queue_lock(b, map, until);
	if (r)
		goto out;
	q = map->q;
	if (lease_has_run(map)) { /* it begins where the read position is */
		queue_unlock(map);
		goto out;
	}
	(void)keep_turns(map);
	mask = ring_mask_of(map);
	head = ld(&q->requeue_head);
	position = ld(&q->disk_read);
	/* The longest run at the requeue ring's end that lies right before the read position. */
	for (at = ld(&q->requeue_tail); at != head; at--) {
		shmq_slot_desc *s = &map->slots[map->requeue[(at - 1) & mask]];

		if (!slot_is(map, map->requeue[(at - 1) & mask], SHMQ_BACK)) {
			queue_broken(map);
			at = ld(&q->requeue_tail);
			break;
		}
		if (s->pos == SHMQ_NO_POSITION || s->previous != SHMQ_FREE || s->pos >> 40 != position >> 40 ||
		    s->pos + s->length + RECORD_HEAD != position)
			break;
		position = s->pos;
	}
	for (uint32_t i = at; i != ld(&q->requeue_tail); i++) {
		shmq_slot_desc *s = &map->slots[map->requeue[i & mask]];

		st_release(&s->word, word_next(ld(&s->word), SHMQ_RESTORED));
		SHMQ_KILLPOINT("unrestore.state");
	}
	*count = ld(&q->requeue_tail) - at;
	if (*count) {
		st_release(&q->disk_read, position);
		SHMQ_KILLPOINT("unrestore.committed");
		bump(&q->disk_depth, *count);
		for (uint32_t i = at, end = ld(&q->requeue_tail); i != end; i++) {
			uint32_t slot = map->requeue[i & mask];

			held_remove(map, slot);
			slot_release(map, slot);
		}
		st_release(&q->requeue_tail, at);
		requeue_firsts_find(map);
	}
	queue_unlock(map);
	if (*count)
		wake_space(b, map);
out:
	map_release(map);
	return r;
}

/* ---- empty ---- */

int shmq_queue_empty(shmq_broker *b, uint32_t queue, uint64_t serial, int64_t until,
                     uint64_t *dropped)
{
	shmq_map *map;
	shmq_queue_desc *q;
	uint64_t count;
	int r = usable_status(b);

	if (!r)
		r = map_get_serial(b, queue, serial, &map);
	if (r)
		return r;
	touch(b, queue);
	r = both_lock(b, map, until);
	if (r)
		goto out;
	q = map->q;
	count = ld(&q->disk_depth) + ld(&q->deferred_depth);
	st(&q->dirty, 1);
	SHMQ_KILLPOINT("empty.dirty");
	for (uint32_t i = 0; i < slots_of(map); i++) {
		shmq_slot_desc *s = &map->slots[i];
		uint64_t word = ld(&s->word);
		unsigned state = SHMQ_STATE_OF(word);

		if (state != SHMQ_READY && state != SHMQ_BACK && state != SHMQ_INFLIGHT &&
		    state != SHMQ_DEFERRED && state != SHMQ_SPILLING && state != SHMQ_RESTORED)
			continue;
		st_release(&s->word, word_next(word, SHMQ_DONE)); /* FREE below, unless pinned */
		SHMQ_KILLPOINT("empty.slot");
		count++;
	}
	if (!SHMQ_PLANTED(6))
		st_release(&q->disk_read, ld(&q->disk_write));
	st(&q->disk_depth, 0);
	st_release(&q->deferred_gone, ld(&q->deferred_write));
	st(&q->deferred_depth, 0);
	SHMQ_KILLPOINT("empty.disk");
	queue_rebuild(b, map, false); /* wakes everybody */
	disk_is_empty(q);
	both_unlock(b, map);
	*dropped = count;
	spiller_ring(b, queue); /* files to drop */
out:
	map_release(map);
	return r;
}
