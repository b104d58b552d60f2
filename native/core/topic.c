/*
 * Publishing: reserve, commit, fan out.
 *
 *   1 room     under P, for every queue: the next n free slots exist and own bodies big enough.
 *              No head has moved; a death or a refusal leaves free slots with bodies.
 *   2 prepare  fields and body, then PREPARED(seq); heads move when every queue is done.
 *   3 commit   topic.committed = last seq. One store decides for all queues and the whole batch.
 *   4 flip     READY or DEFERRED, ring entries, each tail once.
 * A death before 3 makes every PREPARED slot FREE, after it READY (recover.c); the seqs of the dead
 * batch are given again only after that, because every P locker repairs first.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

struct shmq_producer {
	shmq_broker *b;
	shmq_topic_desc *t;
	uint32_t topic, generation;
	/* Read and written under P only, so threads may share a producer. */
	uint64_t version;
	uint32_t attached_as; /* the entries' `touched` belongs to it */
	bool listed;
	shmq_map **maps; /* channels first, then the backlog */
	uint32_t channels, backlog; /* counts; backlog: 0 or 1 */
	shmq_map *lacking;          /* who had no room; a reference */
};

struct shmq_loan {
	shmq_producer *p;
	uint32_t fork_generation;
	uint32_t n, targets;
	bool open;
	uint64_t *lengths;
	uint8_t *scratch; /* every channel was ephemeral and full: there is no slot to fill */
	struct target {
		shmq_map *map;
		uint32_t *slots;
		uint8_t **bodies;
		bool current;
	} *target;
};

/* ---- room ---- */

/* Of a FREE slot. */
static void body_drop(shmq_map *map, shmq_slot_desc *s)
{
	if (s->capacity) {
		if (!arena_free(&map->q->arena, map->arena, arena_of(map), s->body, s->capacity))
			queue_broken(map);
		s->capacity = 0;
	}
}

static bool bodies_drop(shmq_map *map, uint32_t at, uint32_t end)
{
	bool any = false;

	for (; at != end; at++) {
		uint32_t slot = map->free[at & ring_mask_of(map)];
		shmq_slot_desc *s = &map->slots[slot];

		if (!slot_is(map, slot, SHMQ_FREE)) {
			queue_broken(map);
			return false;
		}
		any |= s->capacity != 0;
		body_drop(map, s);
	}
	return any;
}

/* Bodies of everything finished behind the `reserved` slots that are about to be used, and those
 * that an attempt has left there which wanted more slots and failed. */
static bool reclaim(shmq_map *map, uint32_t reserved)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->free_head), tail = ld_acquire(&q->free_tail), at = q->reclaimed;
	uint32_t end = q->endowed;
	bool any = false;

	if (!SANE(tail - head <= slots_of(map))) { /* do not walk 2^32 entries */
		queue_broken(map);
		return false;
	}
	if (at - head < reserved || at - head > tail - head)
		at = head + reserved;
	if ((int32_t)(end - at) > 0)
		end = at;
	if ((int32_t)(end - head - reserved) > 0)
		any = bodies_drop(map, head + reserved, end);
	q->endowed = head + reserved;
	any |= bodies_drop(map, at, tail);
	q->reclaimed = tail;
	return any;
}

static bool arena_grow(shmq_map *map, uint64_t bytes)
{
	shmq_queue_desc *q = map->q;
	uint64_t have = arena_of(map), step = have, want;

	if (step > UINT64_C(8) << 20)
		step = UINT64_C(8) << 20;
	if (step < bytes + SHMQ_ARENA_UNIT)
		step = bytes + SHMQ_ARENA_UNIT;
	want = round_page(have + step);
	if (want > map->arena_max)
		want = map->arena_max;
	if (want <= have || queue_grow_arena(map, have, want))
		return false;
	SHMQ_KILLPOINT("arena.committed");
	if (!arena_extend(&q->arena, map->arena, have, want)) {
		queue_broken(map);
		return false;
	}
	st_release(&q->arena_committed, want);
	return true;
}

static bool body_ensure(shmq_map *map, shmq_slot_desc *s, uint64_t length, uint32_t reserved)
{
	shmq_queue_desc *q = map->q;
	uint64_t need = arena_block_size(length) - SHMQ_ARENA_HEAD, body, spacious;
	uint32_t capacity;

	/* Reuse the block of the slot's last message unless it is far too big. */
	if (s->capacity >= need && s->capacity <= 4 * need + 1024) {
		if (arena_owns(map->arena, arena_of(map), s->body, s->capacity))
			return true;
		queue_broken(map);
		return false;
	}
	body_drop(map, s);
	/* Small bodies: let the arena grow until every slot can keep its block for the next message. */
	spacious = need > 4096 ? 0 : (uint64_t)slots_of(map) * (need + SHMQ_ARENA_HEAD) * 2;
	for (;;) {
		body = arena_alloc(&q->arena, map->arena, arena_of(map), length, &capacity);
		if (body == ARENA_BROKEN) {
			queue_broken(map);
			return false;
		}
		if (body != ARENA_FAILED)
			break;
		if (arena_of(map) < spacious && arena_grow(map, need + SHMQ_ARENA_HEAD))
			continue;
		if (!reclaim(map, reserved) && !arena_grow(map, need + SHMQ_ARENA_HEAD))
			return false;
	}
	s->body = body;
	s->capacity = capacity;
	return true;
}

static bool bodies_ensure(shmq_map *map, const uint64_t *lengths, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		uint32_t slot = free_slot(map, i);

		if (!slot_is(map, slot, SHMQ_FREE)) {
			queue_broken(map);
			return false;
		}
		slots_ahead(map, slot);
		if (!body_ensure(map, &map->slots[slot], lengths[i], n))
			return false;
		bodies_ahead(map, &map->slots[slot]);
	}
	return true;
}

/* The entries of a ring whose mask grew to `wide` to where they are now. */
static bool ring_widen(uint32_t *ring, _Atomic uint32_t *head, _Atomic uint32_t *tail,
                       uint32_t mask, uint32_t wide)
{
	uint32_t at = ld(head), end = ld(tail);

	if (!SANE(end - at - 1 <= mask || end == at))
		return false;
	for (; mask != wide && at != end; at++)
		ring[at & wide] = ring[at & mask];
	return true;
}

/* New slots behind the free ring's last. */
static bool slots_add(shmq_map *map, uint32_t from, uint32_t n)
{
	uint32_t tail = ld(&map->q->free_tail), mask = ring_mask_of(map);

	for (uint32_t i = from; i < n; i++) {
		shmq_slot_desc *s = &map->slots[i];

		if (!SANE(SHMQ_STATE_OF(ld(&s->word)) == SHMQ_FREE))
			return false;
		s->heap = SHMQ_NONE;
		s->capacity = 0;
		map->free[tail++ & mask] = i;
	}
	SHMQ_KILLPOINT("grow.free");
	st_release(&map->q->free_tail, tail); /* SYNC(slot-free) */
	return true;
}

#define SLOTS_STEP 65536u /* nobody waits longer than it takes to get the pages of so many */

/* More slots: pages first, then one word, then what is derived. Whoever comes after a death on the
 * way makes that anew. */
static int slots_grow(shmq_broker *b, shmq_map *map, uint32_t want, int64_t until)
{
	shmq_queue_desc *q = map->q;
	uint32_t have, n, mask, wide;
	int r = queue_lock_under(b, map, until);

	if (r)
		return r;
	have = slots_of(map);
	n = have + (have < SLOTS_STEP ? have : SLOTS_STEP);
	if (n < want)
		n = want;
	if (n > map->slots_max)
		n = map->slots_max;
	for (mask = wide = ring_mask_of(map); wide < n - 1; wide = 2 * wide + 1)
		;
	r = queue_commit_slots(map, n);
	if (!r) {
		st(&q->dirty, 1);
		SHMQ_KILLPOINT("grow.dirty");
		st(&q->ring_mask, wide);
		SHMQ_KILLPOINT("grow.mask");
		st(&q->slots_committed, n);
		SHMQ_KILLPOINT("grow.slots");
		if (ring_widen(map->ready, &q->ready_head, &q->ready_tail, mask, wide) &&
		    ring_widen(map->defer, &q->defer_head, &q->defer_tail, mask, wide) &&
		    ring_widen(map->requeue, &q->requeue_head, &q->requeue_tail, mask, wide) &&
		    ring_widen(map->free, &q->free_head, &q->free_tail, mask, wide) &&
		    slots_add(map, have, n))
			st_release(&q->dirty, 0);
		else
			r = queue_rebuild(b, map, false);
	}
	queue_unlock(map);
	return r;
}

/* Messages in the ready ring, at least: exact when the last look says more than `enough`. P held. */
static uint32_t ready_seen(shmq_queue_desc *q, uint32_t enough)
{
	if (ld(&q->ready_tail) - q->ready_head_seen > enough)
		q->ready_head_seen = ld_acquire(&q->ready_head);
	return ld(&q->ready_tail) - q->ready_head_seen;
}

#define MOST_BODY (UINT32_MAX - 2 * SHMQ_ARENA_UNIT) /* a block's size is told in 32 bits */

enum purpose { FOR_READY, FOR_DEFERRED, FOR_RESTORE };

/* A publisher that must wait says what it needs; the spiller makes room for it. */
static int lacks(shmq_broker *b, shmq_map *map, uint32_t slots, uint64_t bytes,
                 enum purpose purpose)
{
	if (purpose == FOR_RESTORE)
		return SHMQ_FULL;
	st(&map->q->need_slots, slots);
	st(&map->q->need_bytes, bytes);
	if (!(map->q->flags & SHMQ_FLAG_EPHEMERAL))
		spiller_ring(b, map->index);
	return SHMQ_FULL;
}

/* Free slots and bodies for n messages; `used`: of the budget, before them. */
static int room_of(shmq_broker *b, shmq_map *map, const uint64_t *lengths, uint32_t n,
                   uint64_t bytes, enum purpose purpose, int64_t until)
{
	shmq_queue_desc *q = map->q;
	bool to_hold = purpose != FOR_READY;
	uint32_t budget = to_hold ? map->inflight_slots : ready_budget(map), used, have;

	if (to_hold) {
		used = ld(&q->held) + ring_count(&q->defer_head, &q->defer_tail);
	} else {
		uint32_t spilling = ld(&q->spilling_count);

		used = n + spilling < budget ? budget - n - spilling : 0;
		used = ready_seen(q, used) + spilling;
	}
	if (used + n > budget ||
	    (to_hold && used && ld(&q->held_bytes) + bytes > bytes_budget(map))) {
		if (counts_are_sane(map))
			return lacks(b, map, n, bytes, purpose);
		queue_broken(map);
		return SHMQ_AGAIN;
	}
	for (;;) {
		int r;

		have = q->free_tail_seen - ld(&q->free_head);
		if (have >= n && SANE(have <= slots_of(map)))
			break;
		q->free_tail_seen = ld_acquire(&q->free_tail); /* SYNC(slot-free) */
		have = q->free_tail_seen - ld(&q->free_head);
		if (!SANE(have <= slots_of(map))) {
			queue_broken(map);
			return SHMQ_AGAIN;
		}
		if (have >= n)
			break;
		if (slots_of(map) == map->slots_max)
			return lacks(b, map, n, bytes, purpose);
		r = slots_grow(b, map, slots_of(map) - have + n, until);
		if (r == SHMQ_NO_SPACE)
			return lacks(b, map, n, bytes, purpose);
		if (r)
			return r;
	}
	if ((int32_t)(ld(&q->free_head) + n - q->endowed) > 0)
		q->endowed = ld(&q->free_head) + n;
	if (!bodies_ensure(map, lengths, n)) {
		/* The bytes may be behind the very slots that are about to be used. */
		if (!ld(&q->dirty))
			(void)bodies_drop(map, ld(&q->free_head), ld(&q->free_head) + n);
		if (ld(&q->dirty))
			return SHMQ_AGAIN;
		if (!bodies_ensure(map, lengths, n))
			return lacks(b, map, n, bytes, purpose);
	}
	if (purpose == FOR_RESTORE && (used || n > 1)) { /* now by what their blocks really have */
		bytes = ld(&q->held_bytes);
		for (uint32_t i = 0; i < n; i++)
			bytes += block_bytes(&map->slots[free_slot(map, i)]);
		if (bytes > bytes_budget(map))
			return SHMQ_FULL;
	}
	if (purpose != FOR_RESTORE && ld(&q->need_slots)) {
		st(&q->need_slots, 0);
		st(&q->need_bytes, 0);
	}
	return 0;
}

static int room_for(shmq_broker *b, shmq_map *map, const uint64_t *lengths, uint32_t n,
                    enum purpose purpose, int64_t until)
{
	uint32_t budget = purpose == FOR_READY ? ready_budget(map) : map->inflight_slots;
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < n; i++)
		bytes += arena_block_size(lengths[i]);
	if (n > budget)
		return because(SHMQ_TOO_BIG,
		               "%u messages at once; a queue holds %u in memory: publish fewer at once, or "
		               "raise %s",
		               n, budget, purpose == FOR_READY ? "mem_queue_size" : "inflight_slots");
	if (bytes > bytes_budget(map))
		return because(SHMQ_TOO_BIG,
		               "%u messages of %llu bytes in all; a queue holds %llu in memory: publish less "
		               "at once, or raise arena_size",
		               n, (unsigned long long)bytes, (unsigned long long)bytes_budget(map));
	for (bool repaired = false;; repaired = true) {
		int r = words_are_sane(map) ? room_of(b, map, lengths, n, bytes, purpose, until)
		                            : SHMQ_AGAIN;

		/* AGAIN and not dirty: a lock was held elsewhere. */
		if (r != SHMQ_AGAIN || !(ld(&map->q->dirty) || !words_are_sane(map)))
			return r;
		if (repaired)
			return queue_corrupt(map);
		r = queue_lock_under(b, map, until); /* which repairs */
		if (r)
			return r;
		queue_unlock(map);
	}
}

int queue_room(shmq_broker *b, shmq_map *map, const uint64_t *lengths, uint32_t n, int64_t until)
{
	return room_for(b, map, lengths, n, FOR_RESTORE, until);
}

/* ---- producer ---- */

int shmq_producer_open(shmq_broker *b, uint32_t topic, uint32_t generation, shmq_producer **out)
{
	shmq_producer *p;
	int r = usable_status(b);

	if (r)
		return r;
	if (topic >= topics_of(b))
		return SHMQ_INVALID;
	p = calloc(1, sizeof(*p));
	if (!p)
		return SHMQ_NO_MEMORY;
	broker_hold(b);
	p->b = b;
	p->t = &b->topics[topic];
	p->topic = topic;
	p->generation = generation;
	*out = p;
	return 0;
}

static void list_drop(shmq_producer *p)
{
	for (uint32_t i = 0; i < p->channels + p->backlog; i++)
		map_put(p->b, p->maps[i]);
	free(p->maps);
	p->maps = NULL;
	p->channels = p->backlog = 0;
	p->listed = false;
}

void shmq_producer_close(shmq_producer *p)
{
	shmq_broker *b = p->b;

	list_drop(p);
	map_release(p->lacking);
	free(p);
	broker_release(b);
}

/* Whoever waited for its room looks at the topic again. */
static void lacking_drop(shmq_producer *p)
{
	shmq_map *old;

	pthread_mutex_lock(&p->b->mutex); /* as note_lacking */
	old = p->lacking;
	p->lacking = NULL;
	pthread_mutex_unlock(&p->b->mutex);
	map_put(p->b, old);
}

/* The topic's queues, read anew when its version says so. Under P; the only allocation made there,
 * and only when queues come or go. */
static int list_refresh(shmq_producer *p)
{
	shmq_broker *b = p->b;
	uint64_t version = ld(&p->t->version);
	uint32_t n = queues_of(b), count = 0, backlog = SHMQ_NONE;
	int r = 0;

	if (p->listed && p->version == version && p->attached_as == b->client_generation)
		return 0;
	list_drop(p);
	lacking_drop(p);
	for (uint32_t i = 0; i < n; i++)
		count += entry_is(b, i, p->topic);
	p->maps = calloc(count + 1, sizeof(shmq_map *));
	if (!p->maps)
		return SHMQ_NO_MEMORY;
	for (uint32_t i = 0; i < n && !r; i++) {
		if (!entry_is(b, i, p->topic))
			continue;
		if (ld_acquire(&b->entries[i].role) == SHMQ_ROLE_BACKLOG) {
			backlog = i;
			continue;
		}
		r = map_get(b, i, &p->maps[p->channels]);
		p->channels += !r;
		if (!r)
			touch(b, i);
	}
	if (!r && backlog != SHMQ_NONE) {
		r = map_get(b, backlog, &p->maps[p->channels]);
		p->backlog = !r;
		if (!r)
			touch(b, backlog);
	}
	if (r) {
		list_drop(p);
		return r;
	}
	p->version = version;
	p->attached_as = b->client_generation;
	p->listed = true;
	return 0;
}

/* P, the topic alive, the list of its queues true; where to publish. */
static int producer_lock(shmq_producer *p, int64_t until, shmq_map ***targets, uint32_t *count)
{
	shmq_topic_desc *t = p->t;
	int r = usable_status(p->b);

	if (!r)
		r = topic_lock(p->b, t, until);
	if (r)
		return r;
	if (ld(&t->state) != SHMQ_ENTRY_LIVE || ld(&t->generation) != p->generation ||
	    ld(&p->b->d->segment.ready) != SHMQ_READY_STATE)
		r = SHMQ_GONE;
	else if (ld(&p->b->d->stopping))
		r = because(SHMQ_NOT_RUNNING, "the broker is stopping");
	else
		r = list_refresh(p);
	if (r)
		goto out;
	/* While the backlog is not empty the topic goes on publishing into it: first in, first out. */
	if (p->channels && !ld(&t->paused) &&
	    !(p->backlog && !queue_is_empty(p->maps[p->channels]->q))) {
		*targets = p->maps;
		*count = p->channels;
		return 0;
	}
	if (p->backlog) {
		*targets = &p->maps[p->channels];
		*count = 1;
		return 0;
	}
	r = SHMQ_NEED_BACKLOG;
out:
	topic_unlock(t);
	return r;
}

/* Was this published into a backlog that is on its way to the channels? Then this is noted. */
static bool pumped(shmq_producer *p, shmq_map **targets)
{
	if (targets == p->maps || !p->channels || ld(&p->t->paused))
		return false;
	attend(p->b, targets[0]->index);
	return true;
}

static void note_lacking(shmq_producer *p, shmq_map *map)
{
	shmq_map *old = NULL;

	pthread_mutex_lock(&p->b->mutex); /* another thread may just be about to wait for the old one */
	if (p->lacking != map) {
		map_hold(map);
		old = p->lacking;
		p->lacking = map;
	}
	pthread_mutex_unlock(&p->b->mutex);
	map_release(old);
}

static uint64_t id_of(const shmq_broker *b, uint64_t clock)
{
	return clock << SHMQ_ID_NODE_BITS | b->d->limits.node_id;
}

/* n consecutive clock values, stored before the commit. */
static uint64_t clock_take(shmq_topic_desc *t, uint32_t n, int64_t now)
{
	uint64_t clock = (uint64_t)(now - SHMQ_EPOCH_NS) / SHMQ_ID_UNIT_NS, last = ld(&t->id_clock);

	if (now < SHMQ_EPOCH_NS || clock <= last)
		clock = last + 1;
	st(&t->id_clock, clock + n - 1);
	return clock;
}

/* Flip a queue's PREPARED slots and move the tail once. */
static void flip(shmq_broker *b, shmq_map *map, const uint32_t *slots, uint32_t first, uint32_t n,
                 int64_t due, uint64_t bytes)
{
	shmq_queue_desc *q = map->q;
	_Atomic uint32_t *tail = due ? &q->defer_tail : &q->ready_tail;
	uint32_t *ring = due ? map->defer : map->ready, mask = ring_mask_of(map), at = ld(tail);

	for (uint32_t i = 0; i < n; i++) {
		uint32_t slot = slots ? slots[i] : map->free[(first + i) & mask];
		shmq_slot_desc *s = &map->slots[slot];

		if (!slot_is(map, slot, SHMQ_PREPARED)) { /* overwritten since: the commit word decides */
			st(&topic_of(b, map)->dirty, 1);
			continue;
		}
		st_release(&s->word, word_next(ld(&s->word), due ? SHMQ_DEFERRED : SHMQ_READY));
		SHMQ_KILLPOINT("publish.flipped");
		ring[at++ & mask] = slot;
	}
	SHMQ_KILLPOINT("publish.ring");
	st_release(tail, at);
	SHMQ_KILLPOINT("publish.tail");
	bump(&q->enqueued, n);
	bump(&q->enqueued_bytes, bytes);
	if (due)
		due_note(b, map->index, due);
}

/* More than so many READY are the spiller's business: early enough, but once something is on disk
 * all that comes waits behind it anyway. */
static uint32_t high_water(const shmq_broker *b, const shmq_map *map)
{
	if (!b->d->limits.mem_queue_size)
		return 0;
	return ready_budget(map) / 4 * (on_disk(map->q) ? 2 : 3);
}

/* Is it the spiller's turn, now that the last n messages are in the queue? Then this is noted; its
 * bell may be rung after P. */
static bool overflows(shmq_broker *b, shmq_map *map, uint32_t n, bool deferred)
{
	shmq_queue_desc *q = map->q;
	uint32_t mark = high_water(b, map), ready = ready_seen(q, mark);
	bool over = ready > mark && ready - mark <= n; /* above: it was told */

	over |= ld(&q->arena_committed) == map->arena_max && q->arena.free_bytes < map->arena_max / 8;
	over |= deferred && defers_many(map);
	over &= !(q->flags & SHMQ_FLAG_EPHEMERAL);
	if (over)
		attend(b, map->index);
	return over;
}

static void prepare(shmq_slot_desc *s, uint64_t id, uint64_t seq, int64_t now, int64_t due,
                    uint64_t length)
{
	if (SHMQ_PLANTED(1))
		st_release(&s->word, word_next(ld(&s->word), SHMQ_PREPARED));
	s->id = id;
	s->timestamp = now;
	s->order = seq;
	if (!SHMQ_PLANTED(3))
		s->deadline = due;
	s->length = (uint32_t)length;
	s->attempts = 0;
	s->heap = SHMQ_NONE;
	SHMQ_KILLPOINT("publish.fields");
	st_release(&s->word, word_next(ld(&s->word), SHMQ_PREPARED));
	SHMQ_KILLPOINT("publish.prepared");
}

/* A free ring named one slot twice, or was overwritten since: who locks P next frees what was
 * prepared, as after a death. */
static int torn(shmq_topic_desc *t)
{
	st(&t->dirty, 1);
	topic_unlock(t);
	return SHMQ_AGAIN;
}

static int check_bodies(shmq_producer *p, const shmq_body *bodies, uint32_t n, uint64_t *lengths,
                        bool *large)
{
	uint64_t most = p->b->d->limits.max_msg_size;

	*large = false;
	if (!n)
		return because(SHMQ_INVALID, "a batch must hold at least one message");
	for (uint32_t i = 0; i < n; i++) {
		if (!bodies[i].length)
			return because(SHMQ_INVALID, "message %u is empty; nsqd's rule: 1 byte or more", i);
		if (bodies[i].length > most || bodies[i].length > MOST_BODY)
			return because(SHMQ_TOO_BIG,
			               "message %u has %llu bytes; max_msg_size is %llu: raise that option of "
			               "the broker",
			               i, (unsigned long long)bodies[i].length, (unsigned long long)most);
		lengths[i] = bodies[i].length;
		*large |= bodies[i].length >= SHMQ_LARGE;
	}
	return 0;
}

/* As nsqd's DPUB: not longer than a requeue. */
static int check_due(const shmq_producer *p, int64_t due)
{
	int64_t most = p->b->d->limits.max_req_timeout;

	if (due && due - realtime_ns() > most)
		return because(SHMQ_INVALID,
		               "deferred for longer than max_req_timeout (%lld ms): raise that option of "
		               "the broker",
		               (long long)(most / NS_PER_MS));
	return 0;
}

/* Targets that a publish leaves out: ephemeral ones without room. One bit each. */
#define SKIP_WORDS (SHMQ_QUEUES / 64)
#define SKIP(skip, k) ((skip)[(k) / 64] |= UINT64_C(1) << (k) % 64)
#define SKIPPED(skip, k) ((skip)[(k) / 64] >> (k) % 64 & 1)

static void skip_none(uint64_t *skip, uint32_t count)
{
	skip[0] = 0;
	if (count > 64)
		memset(skip, 0, (count + 63) / 64 * sizeof(*skip));
}

/* Room in every target; ephemeral ones without are marked and skipped. */
static int room_everywhere(shmq_producer *p, shmq_map **targets, uint32_t count,
                           const uint64_t *lengths, uint32_t n, bool deferred, int64_t until,
                           uint64_t *skip)
{
	for (uint32_t k = 0; k < count; k++) {
		int r = room_for(p->b, targets[k], lengths, n, deferred ? FOR_DEFERRED : FOR_READY, until);

		if (r == SHMQ_FULL && targets[k]->q->flags & SHMQ_FLAG_EPHEMERAL) {
			SKIP(skip, k);
			continue;
		}
		if (r == SHMQ_GONE)
			r = SHMQ_AGAIN; /* deleted just now: look at the list again */
		if (r == SHMQ_FULL)
			note_lacking(p, targets[k]);
		if (r)
			return r;
	}
	return 0;
}

static int publish_small(shmq_producer *p, const shmq_body *bodies, const uint64_t *lengths,
                         uint32_t n, int64_t due, const shmq_mark *mark, int64_t until,
                         uint64_t *first_id)
{
	shmq_broker *b = p->b;
	shmq_topic_desc *t = p->t;
	shmq_writer_desc *writer = NULL;
	shmq_map **targets;
	uint64_t skip[SKIP_WORDS], seq, clock, bytes = 0;
	uint32_t count, wake = 0;
	shmq_map *few[16];
	bool ring = false;
	int64_t now;
	int r = producer_lock(p, until, &targets, &count);

	if (r)
		return r;
	skip_none(skip, count);
	if (mark)
		r = writer_begin(b, p->topic, mark, &writer);
	if (!r)
		r = room_everywhere(p, targets, count, lengths, n, due != 0, until, skip);
	if (r) {
		topic_unlock(t);
		return r;
	}
	now = realtime_ns();
	clock = clock_take(t, n, now);
	seq = ld(&t->committed) + 1;
	for (uint32_t i = 0; i < n; i++)
		bytes += lengths[i];
	for (uint32_t k = 0; k < count; k++) {
		if (SKIPPED(skip, k))
			continue;
		for (uint32_t i = 0; i < n; i++) {
			uint8_t *body;
			shmq_slot_desc *s = free_slot_for(targets[k], i, lengths[i], &body);

			if (!s)
				return torn(t);
			memcpy(body, bodies[i].data, lengths[i]);
			prepare(s, id_of(b, clock + i), seq + i, now, due, lengths[i]);
		}
	}
	for (uint32_t k = 0; k < count; k++)
		if (!SKIPPED(skip, k)) {
			st_release(&targets[k]->q->free_head, ld(&targets[k]->q->free_head) + n);
			SHMQ_KILLPOINT("publish.head");
		}
	if (writer)
		writer_prepare(writer, mark, seq + n - 1);
	if (!SHMQ_PLANTED(2))
		st_release(&t->committed, seq + n - 1);
	SHMQ_KILLPOINT("publish.committed");
	for (uint32_t k = 0; k < count; k++) {
		shmq_map *map = targets[k];

		if (SKIPPED(skip, k))
			bump(&map->q->dropped, n);
		else
			flip(b, map, NULL, ld(&map->q->free_head) - n, n, due, bytes);
	}
	if (SHMQ_PLANTED(2))
		st_release(&t->committed, seq + n - 1);
	if (writer)
		writer_commit(writer);
	bump(&t->messages, n);
	bump(&t->bytes, bytes);
	/* Who has somebody to wake is remembered and held, for the system calls come after P. */
	fence_full();
	for (uint32_t k = 0; k < count; k++) {
		ring |= overflows(b, targets[k], n, due != 0);
		if (due || !ld(&targets[k]->q->takers.summary))
			continue;
		if (wake < 16) {
			map_hold(targets[k]);
			few[wake++] = targets[k];
		} else {
			wake_takers(b, targets[k], n);
		}
	}
	ring |= pumped(p, targets);
	topic_unlock(t);
	for (uint32_t k = 0; k < wake; k++) {
		wake_takers(b, few[k], n);
		map_release(few[k]);
	}
	if (ring)
		supervisor_ring(b, RING_SPILLER);
	*first_id = id_of(b, clock);
	return 0;
}

/* ---- loans ---- */

static void loan_release(shmq_loan *loan)
{
	for (uint32_t k = 0; k < loan->targets; k++) {
		map_release(loan->target[k].map);
		free(loan->target[k].slots);
		free(loan->target[k].bodies);
	}
	free(loan->target);
	free(loan->lengths);
	free(loan->scratch);
	free(loan);
}

static shmq_loan *loan_make(shmq_producer *p, const uint64_t *lengths, uint32_t n, uint32_t targets)
{
	shmq_loan *loan = calloc(1, sizeof(*loan));

	if (!loan)
		return NULL;
	loan->p = p;
	loan->n = n;
	loan->lengths = malloc(n * sizeof(uint64_t));
	loan->target = calloc(targets ? targets : 1, sizeof(*loan->target));
	if (!loan->lengths || !loan->target)
		goto fail;
	memcpy(loan->lengths, lengths, n * sizeof(uint64_t));
	loan->targets = targets;
	for (uint32_t k = 0; k < targets; k++) {
		loan->target[k].slots = malloc(n * sizeof(uint32_t));
		loan->target[k].bodies = malloc(n * sizeof(uint8_t *));
		if (!loan->target[k].slots || !loan->target[k].bodies)
			goto fail;
		memset(loan->target[k].slots, 0xff, n * sizeof(uint32_t)); /* SHMQ_NONE */
	}
	return loan;
fail:
	loan_release(loan);
	return NULL;
}

/* What is LOANED already is FREE again, in no ring: `torn` has those made anew. */
static void loan_undo(shmq_loan *loan, uint32_t targets)
{
	for (uint32_t k = 0; k < targets; k++) {
		struct target *to = &loan->target[k];

		for (uint32_t i = 0; i < loan->n && to->slots[i] != SHMQ_NONE; i++) {
			_Atomic uint64_t *word = &to->map->slots[to->slots[i]].word;

			if (SHMQ_STATE_OF(ld(word)) == SHMQ_LOANED)
				st_release(word, word_next(ld(word), SHMQ_FREE));
		}
	}
	loan_release(loan);
}

static int loan_begin(shmq_producer *p, const uint64_t *lengths, uint32_t n, bool deferred,
                      int64_t until, shmq_loan **out)
{
	shmq_broker *b = p->b;
	shmq_map **targets;
	shmq_loan *loan = NULL;
	uint64_t skip[SKIP_WORDS], all = 0;
	uint32_t count, lent = 0;
	int r = producer_lock(p, until, &targets, &count);

	if (r)
		return r;
	skip_none(skip, count);
	loan = loan_make(p, lengths, n, count);
	r = loan ? room_everywhere(p, targets, count, lengths, n, deferred, until, skip)
	         : SHMQ_NO_MEMORY;
	if (r)
		goto out;
	for (uint32_t k = 0; k < count; k++) {
		shmq_map *map = targets[k];
		struct target *to = &loan->target[lent];

		if (SKIPPED(skip, k))
			continue;
		map_hold(map);
		to->map = map;
		for (uint32_t i = 0; i < n; i++) {
			shmq_slot_desc *s;

			s = free_slot_for(map, i, lengths[i], &to->bodies[i]);
			if (!s) {
				loan_undo(loan, lent + 1);
				return torn(p->t);
			}
			to->slots[i] = (uint32_t)(s - map->slots);
			s->length = (uint32_t)lengths[i];
			SHMQ_KILLPOINT("loan.fields");
			st_release(&s->word,
			           SHMQ_WORD(SHMQ_LOANED, b->client, SHMQ_GENERATION_OF(ld(&s->word))));
			SHMQ_KILLPOINT("loan.state");
		}
		st_release(&map->q->free_head, ld(&map->q->free_head) + n);
		lent++;
	}
	for (uint32_t k = lent; k < loan->targets; k++) {
		free(loan->target[k].slots);
		free(loan->target[k].bodies);
	}
	loan->targets = lent;
	if (!lent) {
		for (uint32_t i = 0; i < n; i++)
			all += lengths[i];
		loan->scratch = malloc(all);
		r = loan->scratch ? 0 : SHMQ_NO_MEMORY;
		if (r)
			goto out;
	}
	loan->open = true;
	loan->fork_generation = b->fork_generation;
	broker_hold(b);
	*out = loan;
out:
	topic_unlock(p->t);
	if (r && loan)
		loan_release(loan);
	return r;
}

int shmq_loan_begin(shmq_producer *p, uint64_t length, int64_t until, shmq_loan **out)
{
	shmq_body body = {NULL, length};
	uint64_t lengths[1];
	bool large;
	int r = check_bodies(p, &body, 1, lengths, &large);

	return r ? r : loan_begin(p, lengths, 1, false, until, out);
}

static uint8_t *loan_body(shmq_loan *loan, uint32_t target, uint32_t i)
{
	return loan->target[target].bodies[i];
}

void *shmq_loan_data(shmq_loan *loan)
{
	return loan->targets ? loan_body(loan, 0, 0) : loan->scratch;
}

void shmq_loan_truncate(shmq_loan *loan, uint64_t length)
{
	loan->lengths[0] = length;
}

static bool still_ours(shmq_loan *loan, struct target *to, uint32_t i)
{
	uint64_t word = ld(&to->map->slots[to->slots[i]].word);

	return SHMQ_STATE_OF(word) == SHMQ_LOANED && SHMQ_OWNER_OF(word) == loan->p->b->client;
}

/* LOANED slots of targets that are not (or no longer) published to go back, each under its D. */
static int loan_give_back(shmq_loan *loan, bool all, int64_t until)
{
	shmq_broker *b = loan->p->b;

	for (uint32_t k = 0; k < loan->targets; k++) {
		struct target *to = &loan->target[k];
		int r;

		if (!all && to->current)
			continue;
		r = queue_lock(b, to->map, until);
		if (r == SHMQ_GONE)
			continue;
		if (r)
			return r;
		for (uint32_t i = 0; i < loan->n; i++)
			if (still_ours(loan, to, i))
				slot_release(to->map, to->slots[i]);
		queue_unlock(to->map);
		wake_space(b, to->map);
	}
	return 0;
}

/* hint: where it is if no channel has come or gone. */
static struct target *loan_target(shmq_loan *loan, const shmq_map *map, uint32_t hint)
{
	if (hint < loan->targets && loan->target[hint].map == map)
		return &loan->target[hint];
	for (uint32_t k = 0; k < loan->targets; k++)
		if (loan->target[k].map == map)
			return &loan->target[k];
	return NULL;
}

static int loan_commit(shmq_loan *loan, int64_t due, int64_t until, uint64_t *first_id)
{
	shmq_producer *p = loan->p;
	shmq_broker *b = p->b;
	shmq_topic_desc *t = p->t;
	shmq_map **targets;
	uint64_t skip[SKIP_WORDS], seq, clock, bytes = 0;
	uint32_t count, n = loan->n;
	bool ring = false;
	int64_t now;
	int r = producer_lock(p, until, &targets, &count);

	if (r)
		return r;
	skip_none(skip, count);
	/* Channels that are new since the loan began need room now. */
	for (uint32_t k = 0; k < count; k++) {
		if (loan_target(loan, targets[k], k))
			continue;
		r = room_for(b, targets[k], loan->lengths, n, due ? FOR_DEFERRED : FOR_READY, until);
		if (r == SHMQ_FULL && targets[k]->q->flags & SHMQ_FLAG_EPHEMERAL) {
			SKIP(skip, k);
			r = 0;
		}
		if (r == SHMQ_FULL)
			note_lacking(p, targets[k]);
		if (r) {
			topic_unlock(t);
			return r == SHMQ_GONE ? SHMQ_AGAIN : r;
		}
	}
	now = realtime_ns();
	clock = clock_take(t, n, now);
	seq = ld(&t->committed) + 1;
	for (uint32_t k = 0; k < loan->targets; k++)
		loan->target[k].current = false;
	for (uint32_t i = 0; i < n; i++)
		bytes += loan->lengths[i];
	for (uint32_t k = 0; k < count; k++) {
		struct target *lent = loan_target(loan, targets[k], k);

		if (SKIPPED(skip, k))
			continue;
		if (lent)
			lent->current = true;
		for (uint64_t i = 0, at = 0; i < n; i++) {
			uint8_t *body = NULL;
			shmq_slot_desc *s = lent ? &targets[k]->slots[lent->slots[i]]
			                         : free_slot_for(targets[k], (uint32_t)i, loan->lengths[i],
			                                         &body);

			if (lent && !still_ours(loan, lent, (uint32_t)i)) {
				(void)torn(t);
				return queue_corrupt(targets[k]);
			}
			if (!s)
				return torn(t);
			if (!lent)
				memcpy(body,
				       loan->targets ? loan_body(loan, 0, (uint32_t)i)
				                     : loan->scratch + at,
				       loan->lengths[i]);
			at += loan->lengths[i];
			prepare(s, id_of(b, clock + i), seq + i, now, due, loan->lengths[i]);
		}
	}
	for (uint32_t k = 0; k < count; k++)
		if (!SKIPPED(skip, k) && !loan_target(loan, targets[k], k))
			st_release(&targets[k]->q->free_head, ld(&targets[k]->q->free_head) + n);
	st_release(&t->committed, seq + n - 1);
	SHMQ_KILLPOINT("loan.committed");
	for (uint32_t k = 0; k < count; k++) {
		struct target *lent = loan_target(loan, targets[k], k);

		if (SKIPPED(skip, k))
			bump(&targets[k]->q->dropped, n);
		else
			flip(b, targets[k], lent ? lent->slots : NULL, ld(&targets[k]->q->free_head) - n, n,
			     due, bytes);
		if (!due)
			wake_takers(b, targets[k], n); /* under P: rare and large enough not to matter */
		ring |= overflows(b, targets[k], n, due != 0);
	}
	ring |= pumped(p, targets);
	bump(&t->messages, n);
	bump(&t->bytes, bytes);
	topic_unlock(t);
	if (ring)
		supervisor_ring(b, RING_SPILLER);
	*first_id = id_of(b, clock);
	loan->open = false;
	return 0;
}

int shmq_loan_commit(shmq_loan *loan, int64_t due, int64_t until, uint64_t *id)
{
	int r;

	if (loan->open && (r = check_due(loan->p, due)))
		return r;
	/* What was written into the first body, to the others; outside the lock, it may be long. */
	for (uint32_t k = 1; loan->open && k < loan->targets; k++)
		for (uint32_t i = 0; i < loan->n; i++)
			memcpy(loan_body(loan, k, i), loan_body(loan, 0, i), loan->lengths[i]);
	r = loan->open ? loan_commit(loan, due, until, id) : SHMQ_CLOSED;
	/* What is left over is given back later at the latest by the reaper; try hard now. */
	if (!r)
		(void)loan_give_back(loan, false, later(now_ns(), NS_PER_S));
	return r;
}

int shmq_loan_cancel(shmq_loan *loan, int64_t until)
{
	int r = usable_status(loan->p->b);

	if (!loan->open || r == SHMQ_FORKED || r == SHMQ_CLOSED)
		return 0;
	r = loan_give_back(loan, true, until);
	if (!r)
		loan->open = false;
	return r;
}

void shmq_loan_free(shmq_loan *loan)
{
	shmq_broker *b = loan->p->b;

	loan_release(loan);
	broker_release(b);
}

/* Large bodies: lent, copied outside the lock, committed together. */
static int publish_large(shmq_producer *p, const shmq_body *bodies, const uint64_t *lengths,
                         uint32_t n, int64_t due, int64_t until, uint64_t *first_id)
{
	shmq_loan *loan;
	int r = loan_begin(p, lengths, n, due != 0, until, &loan);

	if (r)
		return r;
	for (uint64_t i = 0, at = 0; i < n; at += lengths[i++])
		memcpy(loan->targets ? loan_body(loan, 0, (uint32_t)i) : loan->scratch + at,
		       bodies[i].data, lengths[i]);
	/* Wait a little: the copy should not be thrown away for a lock that is busy just now. */
	r = shmq_loan_commit(loan, due, later(now_ns(), NS_PER_S / 10), first_id);
	if (r)
		(void)shmq_loan_cancel(loan, later(now_ns(), NS_PER_S));
	shmq_loan_free(loan);
	return r;
}

static int publish(shmq_producer *p, const shmq_body *bodies, uint32_t n, int64_t due,
                   const shmq_mark *mark, int64_t until, uint64_t *first_id)
{
	uint64_t few[256], *lengths = n <= 256 ? few : malloc(n * sizeof(uint64_t));
	bool large;
	int r;

	if (!lengths)
		return SHMQ_NO_MEMORY;
	because_nothing();
	r = check_bodies(p, bodies, n, lengths, &large);
	if (!r)
		r = check_due(p, due);
	if (!r)
		/* Marked ones are copied under the lock, large or not: the mark belongs to their commit. */
		r = large && !mark ? publish_large(p, bodies, lengths, n, due, until, first_id)
		                   : publish_small(p, bodies, lengths, n, due, mark, until, first_id);
	if (lengths != few)
		free(lengths);
	return r;
}

int shmq_publish(shmq_producer *p, const shmq_body *bodies, uint32_t n, int64_t due, int64_t until,
                 uint64_t *first_id)
{
	return publish(p, bodies, n, due, NULL, until, first_id);
}

int shmq_publish_marked(shmq_producer *p, const shmq_body *bodies, uint32_t n,
                        const shmq_mark *mark, int64_t until, uint64_t *first_id)
{
	return publish(p, bodies, n, 0, mark, until, first_id);
}

int shmq_mark_read(shmq_producer *p, const uint64_t key[2], int64_t until, shmq_mark *out)
{
	shmq_map **targets;
	shmq_writer_desc *writer;
	uint32_t count;
	int r = producer_lock(p, until, &targets, &count);

	if (r)
		return r;
	*out = (shmq_mark){.key = {key[0], key[1]}, .epoch = UINT64_MAX - 1};
	r = writer_begin(p->b, p->topic, out, &writer);
	if (!r) {
		out->epoch = writer->epoch;
		out->upto = writer->rows;
	}
	topic_unlock(p->t);
	return r;
}

int shmq_producer_wait(shmq_producer *p, int64_t deadline)
{
	shmq_broker *b = p->b;
	shmq_map *map;
	uint32_t bell;
	bool slept;
	int r = usable_status(b);

	if (r)
		return r;
	pthread_mutex_lock(&b->mutex);
	map = p->lacking;
	if (map)
		map_hold(map);
	pthread_mutex_unlock(&b->mutex);
	if (!map || bell_get(b, &bell)) {
		struct timespec t = timespec_of(NS_PER_MS);

		map_release(map);
		if (clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL))
			return SHMQ_INTERRUPTED;
		return now_ns() < deadline ? 0 : SHMQ_TIMEOUT;
	}
	wait_announce(&map->q->space, bell);
	if (ring_count(&map->q->ready_head, &map->q->ready_tail) > ready_budget(map) / 4 * 3 ||
	    ld(&map->q->need_bytes))
		r = bell_wait(b, bell, deadline, 10 * NS_PER_MS, &slept);
	wait_withdraw(&map->q->space, bell);
	bell_put(b, bell);
	map_release(map);
	return r;
}

/* ---- the backlog's way to several channels ---- */

/* The next message of a backlog: requeue ring, then (nothing on disk) ready ring, then deferred. */
static uint32_t backlog_next(shmq_map *map, unsigned *from)
{
	shmq_queue_desc *q = map->q;
	uint32_t mask = ring_mask_of(map);

	if (ld(&q->requeue_head) != ld(&q->requeue_tail)) {
		*from = SHMQ_BACK;
		return map->requeue[ld(&q->requeue_head) & mask];
	}
	if (!on_disk(q) && ld(&q->ready_head) != ld(&q->ready_tail)) {
		*from = SHMQ_READY;
		return map->ready[ld(&q->ready_head) & mask];
	}
	if (!on_disk(q) && ld(&q->deferred_len)) {
		*from = SHMQ_DEFERRED;
		return map->deferred.slot[0];
	}
	*from = SHMQ_FREE;
	return SHMQ_NONE;
}

/* One message, one transaction. P and the backlog's D held. */
static int pump_one(shmq_broker *b, shmq_topic_desc *t, shmq_map *backlog, shmq_map **channels,
                    uint32_t count, int64_t until)
{
	shmq_queue_desc *q = backlog->q;
	unsigned from;
	uint32_t slot = backlog_next(backlog, &from);
	shmq_slot_desc *s = &backlog->slots[slot];
	uint64_t length, skip[SKIP_WORDS], seq = ld(&t->committed) + 1;
	int64_t due;
	span at;

	if (from == SHMQ_FREE)
		return SHMQ_EMPTY;
	if (!slot_is(backlog, slot, from) || !body_in(backlog, s, &at)) {
		queue_broken(backlog);
		return SHMQ_AGAIN;
	}
	length = at.length;
	due = from == SHMQ_DEFERRED ? s->deadline : 0;
	skip_none(skip, count);
	for (uint32_t k = 0; k < count; k++) {
		int r = room_for(b, channels[k], &length, 1, due ? FOR_DEFERRED : FOR_READY, until);

		if (r == SHMQ_FULL && channels[k]->q->flags & SHMQ_FLAG_EPHEMERAL)
			SKIP(skip, k);
		else if (r)
			return r;
	}
	s->previous = (uint16_t)from;
	s->move = seq;
	SHMQ_KILLPOINT("pump.fields");
	st_release(&s->word, word_next(ld(&s->word), SHMQ_MOVING));
	SHMQ_KILLPOINT("pump.moving");
	for (uint32_t k = 0; k < count; k++) {
		uint8_t *body;
		shmq_slot_desc *to = free_slot_for(channels[k], 0, length, &body);

		if (SKIPPED(skip, k))
			continue;
		if (!to) { /* overwritten since: as after a death */
			st(&t->dirty, 1);
			return SHMQ_AGAIN;
		}
		memcpy(body, backlog->arena + at.body, length);
		prepare(to, s->id, seq, s->timestamp, due, length);
		to->attempts = s->attempts;
		st_release(&channels[k]->q->free_head, ld(&channels[k]->q->free_head) + 1);
	}
	st_release(&t->committed, seq);
	SHMQ_KILLPOINT("pump.committed");
	for (uint32_t k = 0; k < count; k++)
		if (SKIPPED(skip, k))
			bump(&channels[k]->q->dropped, 1);
		else
			flip(b, channels[k], NULL, ld(&channels[k]->q->free_head) - 1, 1, due, length);
	if (from == SHMQ_BACK)
		st_release(&q->requeue_head, ld(&q->requeue_head) + 1);
	else if (from == SHMQ_READY)
		st_release(&q->ready_head, ld(&q->ready_head) + 1);
	else
		heap_remove(&backlog->deferred, slot);
	if (from != SHMQ_READY)
		held_remove(backlog, slot);
	SHMQ_KILLPOINT("pump.popped");
	slot_release(backlog, slot);
	return 0;
}

int shmq_pump(shmq_broker *b, uint32_t topic, uint32_t generation, uint32_t n, int64_t until,
              uint32_t *moved)
{
	shmq_producer *p;
	shmq_map **targets;
	uint32_t count;
	int r = shmq_producer_open(b, topic, generation, &p);

	*moved = 0;
	if (r)
		return r;
	r = producer_lock(p, until, &targets, &count);
	if (r) {
		shmq_producer_close(p);
		return r == SHMQ_NEED_BACKLOG ? SHMQ_EMPTY : r;
	}
	if (ld(&p->t->paused) || !p->channels || !p->backlog) {
		r = SHMQ_EMPTY;
	} else {
		shmq_map *backlog = p->maps[p->channels];

		r = queue_lock_under(b, backlog, until);
		if (!r) {
			defer_drain(b, backlog);
			while (*moved < n && !(r = pump_one(b, p->t, backlog, p->maps, p->channels, until)))
				++*moved;
			queue_unlock(backlog);
		}
	}
	for (uint32_t k = 0; *moved && k < p->channels; k++)
		(void)overflows(b, p->maps[k], UINT32_MAX, true); /* our caller looks */
	topic_unlock(p->t);
	for (uint32_t k = 0; *moved && k < p->channels; k++)
		wake_takers(b, p->maps[k], *moved);
	if (*moved && p->backlog)
		wake_space(b, p->maps[p->channels]);
	shmq_producer_close(p);
	return *moved ? 0 : r;
}
