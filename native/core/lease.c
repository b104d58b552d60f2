/*
 * Leases: messages held under a name, read as often as wanted, then finished all at once.
 *
 * The word of a lease's entry (state | id << 8) is the commit word of all its messages; a slot that
 * is LEASED names its lease in `move`, and the id says which entry that is. Everything is under D.
 *
 *   take     entry's fields, its word TAKING(id); then of each message fields, LEASED, ring head;
 *            the parts; the word HELD. A death before that: every slot is again what it was
 *            (`previous`; its order and `after` were not touched), after it: they are leased.
 *   finish   the word FINISHED; then each slot FREE or DONE, in bites, because nothing else depends
 *            on it: what is left over the supervisor's scan frees (lease_deadline is then 0).
 *            A death before the word: still held, after it: a rebuild makes all of them free.
 *   return   `base`, the order of the first, so that they come before all that is BACK already; the
 *            word RETURNED; then each slot BACK with base + its turn, ring entry; the ring's head
 *            once. A death after the word: a rebuild makes them BACK with the same orders.
 *
 * A lease may also hold a run of records on disk (the queue's `run`), behind all that was BACK. They
 * lie at the read position, and that stays until the word is FINISHED; then it goes behind them. A
 * death between the two: a rebuild moves it, if it is still where the run begins (it is not if the
 * queue was emptied). A lease that goes back has nothing to undo there.
 *
 * The entry is FREE last, when no slot names it. A reader takes no lock: it copies and then looks
 * whether the word is still HELD(id); slots and bodies of a lease are still until that changes.
 *
 * What is derived: `leased` (a count). Never lowered: lease_id, a lessee's incarnation and finished.
 */
#include "internal.h"

#include <string.h>

#define BITE 4096u
#define WORD(state, id) ((uint64_t)(state) | (uint64_t)(id) << 8)
#define LEASE_STATE(word) ((unsigned)((word) & 0xff))
#define LEASE_ID(word) ((word) >> 8)

static shmq_lease_desc *entry_of(const shmq_map *map, uint64_t id)
{
	return &map->leases[id % SHMQ_LEASES];
}

static bool has_leases(shmq_map *map)
{
	return ld_acquire(&map->q->leases_committed) &&
	       (SANE(ld(&map->leases_backed)) || !queue_commit_leases(map));
}

static shmq_lease_desc *held(shmq_map *map, uint64_t id)
{
	shmq_lease_desc *e = has_leases(map) ? entry_of(map, id) : NULL;

	return e && id && ld(&e->word) == WORD(SHMQ_LEASE_HELD, id) ? e : NULL;
}

/* Its next slot, or NULL if what is in it cannot be right. */
static shmq_slot_desc *slot_of(shmq_map *map, const shmq_lease_desc *e, uint32_t slot)
{
	shmq_slot_desc *s;

	if (!slot_is(map, slot, SHMQ_LEASED))
		return NULL;
	s = &map->slots[slot];
	return s->move == LEASE_ID(ld(&e->word)) ? s : NULL;
}

/* ---- what lies on disk ---- */

bool lease_has_run(shmq_map *map)
{
	const shmq_run_desc *run = &map->q->run;

	return held(map, ld(&run->lease)) && ld(&map->q->disk_read) == run->from; /* not emptied */
}

/* The lease's run, if it has one, is nobody's; finished: and read. */
static void run_end(shmq_map *map, uint64_t id, bool finished)
{
	shmq_run_desc *run = &map->q->run;
	uint64_t depth = ld(&map->q->disk_depth);

	if (ld(&run->lease) != id)
		return;
	if (finished && ld(&map->q->disk_read) == run->from) {
		st_release(&map->q->disk_read, run->to);
		SHMQ_KILLPOINT("lease.run_read");
		st(&map->q->disk_depth, depth > run->count ? depth - run->count : 0);
		(void)disk_is_empty(map->q);
	}
	st_release(&run->lease, 0);
}

static int run_check(const shmq_map *map, const shmq_run *run)
{
	shmq_queue_desc *q = map->q;

	if (!run->count || !run->parts || run->parts > SHMQ_LEASE_PARTS || run->from >= run->to)
		return because(SHMQ_INVALID, "a run has 1 record or more in 1 to %d parts",
		               SHMQ_LEASE_PARTS);
	if (ld(&q->disk_read) != run->from || run->to > ld(&q->disk_write))
		return SHMQ_EMPTY;
	return 0;
}

/* Behind what was gathered, if that is all that comes before it. */
static void run_take(shmq_map *map, shmq_lease_desc *e, uint64_t id, uint32_t n, uint64_t max_bytes,
                     const shmq_run *from)
{
	shmq_queue_desc *q = map->q;
	shmq_run_desc *run = &q->run;

	if (lease_has_run(map) || ld(&q->base_pending) || ld(&q->requeue_head) != ld(&q->requeue_tail) ||
	    from->count > n - e->count)
		return;
	if ((e->count || from->count > 1) &&
	    (e->bytes > max_bytes || from->bytes > max_bytes - e->bytes))
		return;
	st(&run->lease, 0);
	fence_full(); /* a reader of an emptied one sees that before it sees anything of ours */
	run->from = from->from;
	run->to = from->to;
	run->bytes = from->bytes;
	run->count = from->count;
	memcpy(run->at, from->at, from->parts * sizeof(run->at[0]));
	SHMQ_KILLPOINT("lease.run");
	st_release(&run->lease, id);
	e->on_disk = from->count;
	e->bytes += from->bytes;
	e->parts = from->parts;
}

/* ---- for the rebuild ---- */

unsigned lease_resolve(shmq_map *map, shmq_slot_desc *s)
{
	const shmq_lease_desc *e = entry_of(map, s->move);
	uint64_t word = has_leases(map) ? ld(&e->word) : 0;

	if (LEASE_ID(word) == s->move)
		switch (LEASE_STATE(word)) {
		case SHMQ_LEASE_HELD:
			return SHMQ_LEASED;
		case SHMQ_LEASE_FINISHED:
			return SHMQ_DONE;
		case SHMQ_LEASE_TAKING:
			return s->previous == SHMQ_READY ? SHMQ_READY : SHMQ_BACK;
		case SHMQ_LEASE_RETURNED:
			s->order = e->base + s->turn;
			s->attempts++;
		}
	s->after = 0; /* also what no lease knows: garbage, not a death */
	s->pos = SHMQ_NO_POSITION;
	return SHMQ_BACK;
}

void lease_resolved(shmq_map *map)
{
	uint64_t run = ld(&map->q->run.lease);

	if (run && !lease_has_run(map))
		run_end(map, run,
		        has_leases(map) && ld(&entry_of(map, run)->word) == WORD(SHMQ_LEASE_FINISHED, run));
	for (uint32_t i = 0; has_leases(map) && i < SHMQ_LEASES; i++)
		if (LEASE_STATE(ld(&map->leases[i].word)) != SHMQ_LEASE_HELD)
			st_release(&map->leases[i].word, 0);
}

/* ---- ending ---- */

/* Up to `most` slots of a finished lease; false: some are left. */
static bool free_some(shmq_map *map, shmq_lease_desc *e, uint32_t most)
{
	int64_t realtime = realtime_ns();

	while (e->left && most--) {
		uint32_t slot = e->at;
		shmq_slot_desc *s = slot_of(map, e, slot);

		if (!s)
			break; /* garbage: a rebuild would make the rest BACK */
		slots_ahead(map, slot);
		e->at = s->next;
		e->left--;
		latency_record(map->latency, s->timestamp, realtime);
		held_remove(map, slot);
		st(&map->q->leased, ld(&map->q->leased) - 1);
		slot_release(map, slot);
		SHMQ_KILLPOINT("lease.freed");
	}
	if (e->left && slot_of(map, e, e->at))
		return false;
	latency_turn(map->latency, realtime);
	st_release(&e->word, 0);
	return true;
}

static void finish(shmq_map *map, shmq_lease_desc *e)
{
	uint64_t id = LEASE_ID(ld(&e->word));
	shmq_lessee_desc *lessee = &map->lessees[e->lessee % SHMQ_LESSEES];

	e->at = e->first[0];
	e->left = e->count;
	if (ld(&lessee->finished) < id)
		st(&lessee->finished, id);
	SHMQ_KILLPOINT("lease.finishing");
	st_release(&e->word, WORD(SHMQ_LEASE_FINISHED, id));
	fence_full(); /* a reader that sees any of what follows sees this */
	SHMQ_KILLPOINT("lease.finished");
	run_end(map, id, true);
	bump(&map->q->finished, (uint64_t)e->count + e->on_disk);
}

/* false: not at all, what it would come in front of is garbage; the next who locks repairs. */
static bool give_back(shmq_map *map, shmq_lease_desc *e)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->requeue_head), mask = ring_mask_of(map), n = e->count, slot = e->first[0];
	uint64_t id = LEASE_ID(ld(&e->word));
	bool waits = head != ld(&q->requeue_tail);

	if (waits && !slot_is(map, map->requeue[head & mask], SHMQ_BACK)) {
		queue_broken(map);
		return false;
	}
	e->base = (waits ? map->slots[map->requeue[head & mask]].order : ld(&q->order) + 1) - n;
	SHMQ_KILLPOINT("lease.returning");
	st_release(&e->word, WORD(SHMQ_LEASE_RETURNED, id));
	fence_full(); /* as in finish */
	SHMQ_KILLPOINT("lease.returned");
	run_end(map, id, false);
	for (uint32_t i = 0; i < n; i++) {
		shmq_slot_desc *s = slot_of(map, e, slot);

		if (!s) {
			queue_broken(map); /* a rebuild makes of it what it can */
			return true;
		}
		slots_ahead(map, slot);
		map->requeue[(head - n + i) & mask] = slot;
		slot = s->next;
		s->order = e->base + i;
		s->after = 0;
		s->pos = SHMQ_NO_POSITION;
		s->attempts++;
		SHMQ_KILLPOINT("lease.fields_back");
		st_release(&s->word, word_next(ld(&s->word), SHMQ_BACK));
		SHMQ_KILLPOINT("lease.back");
	}
	st_release(&q->requeue_head, head - n);
	st(&q->leased, ld(&q->leased) - n);
	bump(&q->returned, (uint64_t)n + e->on_disk);
	st_release(&e->word, 0);
	return true;
}

/* The lessee's open lease of the highest id, or NULL. */
static shmq_lease_desc *newest_of(shmq_map *map, uint32_t lessee)
{
	shmq_lease_desc *found = NULL;

	for (uint32_t i = 0; i < SHMQ_LEASES; i++) {
		shmq_lease_desc *e = &map->leases[i];

		if (LEASE_STATE(ld(&e->word)) == SHMQ_LEASE_HELD && e->lessee == lessee &&
		    (!found || ld(&e->word) > ld(&found->word)))
			found = e;
	}
	return found;
}

static shmq_lease_desc *oldest_of(shmq_map *map, uint32_t lessee, uint64_t above)
{
	shmq_lease_desc *found = NULL;

	for (uint32_t i = 0; i < SHMQ_LEASES; i++) {
		shmq_lease_desc *e = &map->leases[i];
		uint64_t word = ld(&e->word);

		if (LEASE_STATE(word) == SHMQ_LEASE_HELD && e->lessee == lessee && LEASE_ID(word) > above &&
		    (!found || word < ld(&found->word)))
			found = e;
	}
	return found;
}

/* All of them, the newest first, so that the oldest message is in front. */
static uint32_t return_all_of(shmq_map *map, uint32_t lessee, uint64_t *messages)
{
	shmq_lease_desc *e;
	uint32_t n = 0;

	while ((e = newest_of(map, lessee)) && !ld(&map->q->dirty)) {
		if (!give_back(map, e))
			break;
		*messages += (uint64_t)e->count + e->on_disk;
		n++;
	}
	return n;
}

void lease_return_all(shmq_map *map)
{
	uint64_t ignored = 0;

	for (uint32_t i = 0; has_leases(map) && i < SHMQ_LESSEES; i++)
		(void)return_all_of(map, i, &ignored);
	for (uint32_t i = 0; has_leases(map) && i < SHMQ_LEASES; i++)
		if (LEASE_STATE(ld(&map->leases[i].word)) == SHMQ_LEASE_FINISHED)
			(void)free_some(map, &map->leases[i], UINT32_MAX);
}

int64_t lease_deadline(shmq_map *map)
{
	int64_t first = INT64_MAX;

	if (!has_leases(map) || (!ld(&map->q->leased) && !ld(&map->q->run.lease)))
		return first;
	for (uint32_t i = 0; i < SHMQ_LEASES; i++) {
		const shmq_lease_desc *e = &map->leases[i];
		unsigned state = LEASE_STATE(ld(&e->word));
		int64_t deadline = ld(&map->lessees[e->lessee % SHMQ_LESSEES].deadline);

		if (state == SHMQ_LEASE_FINISHED)
			return 0;
		if (state == SHMQ_LEASE_HELD && deadline < first)
			first = deadline;
	}
	return first;
}

void lease_expire(shmq_map *map, int64_t now, uint32_t limit, uint32_t *returned)
{
	if (lease_deadline(map) > now)
		return;
	for (uint32_t i = 0; i < SHMQ_LEASES; i++)
		if (LEASE_STATE(ld(&map->leases[i].word)) == SHMQ_LEASE_FINISHED)
			(void)free_some(map, &map->leases[i], limit);
	for (uint32_t i = 0; i < SHMQ_LESSEES; i++) {
		shmq_lessee_desc *l = &map->lessees[i];
		uint64_t messages = 0;

		if (!ld(&l->state) || ld(&l->deadline) > now)
			continue;
		bump(&l->lost, return_all_of(map, i, &messages));
		*returned += (uint32_t)messages;
	}
}

void lease_orphan(shmq_broker *b, shmq_map *map, uint32_t client)
{
	if (!has_leases(map))
		return;
	for (uint32_t i = 0; i < SHMQ_LESSEES; i++) {
		shmq_lessee_desc *l = &map->lessees[i];

		if (ld(&l->client) != client + 1)
			continue;
		st(&l->deadline, later(now_ns(), l->grace));
		SHMQ_KILLPOINT("lease.orphaned");
		st(&l->client, 0);
	}
	deadline_note(b, map);
}

/* ---- lessees ---- */

/* Pages behind the two tables, at the first lessee of the queue. */
static int tables_commit(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	int r;

	if (has_leases(map))
		return 0;
	r = queue_commit_leases(map);
	if (!r)
		st_release(&q->leases_committed, 1);
	return r;
}

static shmq_lessee_desc *lessee_find(shmq_map *map, const char *name)
{
	shmq_lessee_desc *unused = NULL, *idle = NULL;

	for (uint32_t i = 0; i < SHMQ_LESSEES; i++) {
		shmq_lessee_desc *l = &map->lessees[i];

		if (!ld(&l->state)) {
			if (!unused)
				unused = l;
		} else if (!strncmp(l->name, name, SHMQ_NAME)) {
			return l;
		} else if (!ld(&l->client) && !newest_of(map, i) &&
		           (!idle || ld(&l->deadline) < ld(&idle->deadline))) {
			idle = l; /* nobody's, with no lease: the one left longest ago gives way */
		}
	}
	return unused ? unused : idle;
}

int shmq_lessee_open(shmq_broker *b, uint32_t queue, uint64_t serial, const char *name,
                     int64_t ttl_ns, int64_t grace_ns, int64_t until, shmq_lessee *out)
{
	shmq_client_desc *client = &b->clients[b->client];
	shmq_lessee_desc *l;
	shmq_map *map;
	int r = usable_status(b);

	if (!r && (!*name || strlen(name) >= SHMQ_NAME))
		r = because(SHMQ_INVALID, "a lessee's name has 1 to %d bytes", SHMQ_NAME - 1);
	if (!r)
		r = map_get_serial(b, queue, serial, &map);
	if (r)
		return r;
	touch(b, queue);
	r = queue_lock(b, map, until);
	if (r)
		goto out;
	r = tables_commit(map);
	l = r ? NULL : lessee_find(map, name);
	if (!r && !l)
		r = because(SHMQ_TABLE_FULL, "%d names lease from this channel", SHMQ_LESSEES);
	if (r) {
		queue_unlock(map);
		goto out;
	}
	if (!ld(&l->state) || strncmp(l->name, name, SHMQ_NAME)) {
		st_release(&l->state, 0);
		memset(l->name, 0, sizeof(l->name));
		memcpy(l->name, name, strlen(name));
		st(&l->finished, 0);
		st(&l->lost, 0);
	}
	l->ttl = ttl_ns > 0 ? ttl_ns : INT64_MAX;
	l->grace = grace_ns > 0 ? grace_ns : INT64_MAX;
	l->pid = client->pid;
	l->start_time = client->start_time;
	st(&l->deadline, later(now_ns(), l->ttl));
	st(&l->incarnation, ld(&l->incarnation) + 1);
	SHMQ_KILLPOINT("lessee.filled");
	st(&l->client, b->client + 1);
	st_release(&l->state, 1);
	*out = (shmq_lessee){.queue = queue,
	                     .index = (uint32_t)(l - map->lessees),
	                     .serial = serial,
	                     .incarnation = ld(&l->incarnation)};
	queue_unlock(map);
out:
	map_release(map);
	return r;
}

/* The queue's D, with a sign of life of the lessee, if it still is the newest of its name. */
static int lessee_lock(shmq_broker *b, const shmq_lessee *l, int64_t until, shmq_map **out,
                       shmq_lessee_desc **lessee)
{
	shmq_map *map;
	int r = usable_status(b);

	if (!r)
		r = map_get_serial(b, l->queue, l->serial, &map);
	if (r)
		return r;
	r = queue_lock(b, map, until);
	if (!r) {
		*lessee = &map->lessees[l->index % SHMQ_LESSEES];
		if (!has_leases(map) || !ld(&(*lessee)->state) ||
		    ld(&(*lessee)->incarnation) != l->incarnation) {
			queue_unlock(map);
			r = SHMQ_LEASE_FENCED;
		}
	}
	if (r) {
		map_release(map);
		return r;
	}
	if (ld(&(*lessee)->client))
		st(&(*lessee)->deadline, later(now_ns(), (*lessee)->ttl));
	*out = map;
	return 0;
}

static void lessee_unlock(shmq_map *map)
{
	queue_unlock(map);
	map_release(map);
}

int shmq_lessee_touch(shmq_broker *b, const shmq_lessee *l, int64_t until)
{
	shmq_lessee_desc *lessee;
	shmq_map *map;
	int r = lessee_lock(b, l, until, &map, &lessee);

	if (!r)
		lessee_unlock(map);
	return r;
}

int shmq_lessee_close(shmq_broker *b, const shmq_lessee *l, int64_t until)
{
	shmq_lessee_desc *lessee;
	shmq_map *map;
	int r = lessee_lock(b, l, until, &map, &lessee);

	if (r)
		return r;
	st(&lessee->deadline, later(now_ns(), lessee->grace));
	st(&lessee->client, 0);
	deadline_note(b, map);
	lessee_unlock(map);
	return 0;
}

/* ---- taking ---- */

static void describe(const shmq_lease_desc *e, shmq_lease *out)
{
	*out = (shmq_lease){.id = LEASE_ID(ld(&e->word)),
	                    .parent = e->parent,
	                    .bytes = e->bytes,
	                    .count = e->count + e->on_disk,
	                    .parts = e->parts,
	                    .replays = ld(&e->replays),
	                    .on_disk = e->on_disk};
}

/* The entry of the next id that is free. */
static shmq_lease_desc *entry_new(shmq_map *map, uint64_t *id)
{
	uint64_t last = ld(&map->q->lease_id);

	for (*id = last + 1; *id <= last + SHMQ_LEASES; ++*id) {
		shmq_lease_desc *e = entry_of(map, *id);

		if (LEASE_STATE(ld(&e->word)) == SHMQ_LEASE_FINISHED)
			(void)free_some(map, e, BITE);
		if (!ld(&e->word))
			return e;
	}
	return NULL;
}

/* Into the lease while there is something; the slots are noted in the requeue ring behind its tail,
 * which is scratch space. */
static uint32_t gather(shmq_map *map, shmq_lease_desc *e, uint64_t id, uint32_t n, uint64_t max_bytes)
{
	shmq_queue_desc *q = map->q;
	uint32_t taken = 0, slot, mask = ring_mask_of(map), tail = ld(&q->requeue_tail);
	shmq_slot_desc *last = NULL;
	_Atomic uint32_t *head;
	span at;

	while (taken < n && queue_next(map, &slot, &head, &at)) {
		shmq_slot_desc *s = &map->slots[slot];
		uint64_t word = ld(&s->word);

		if (taken && e->bytes + at.length > max_bytes)
			break;
		slots_ahead(map, slot);
		s->move = id;
		s->turn = taken;
		s->next = SHMQ_NONE;
		s->previous = head == &q->ready_head ? SHMQ_READY : SHMQ_BACK;
		SHMQ_KILLPOINT("lease.fields");
		st_release(&s->word, SHMQ_WORD(SHMQ_LEASED, 0, SHMQ_GENERATION_OF(word) + 1));
		SHMQ_KILLPOINT("lease.state");
		st_release(head, ld(head) + 1);
		SHMQ_KILLPOINT("lease.head");
		if (s->previous == SHMQ_READY)
			held_add(map, slot);
		if (last)
			last->next = slot;
		last = s;
		map->requeue[(tail + taken++) & mask] = slot;
		e->bytes += at.length;
	}
	return taken;
}

/* Where each part begins in memory: shares of the same size, or nothing. */
static void split(shmq_map *map, shmq_lease_desc *e)
{
	uint32_t tail = ld(&map->q->requeue_tail), mask = ring_mask_of(map);

	for (uint32_t p = 0; p < e->parts; p++) {
		uint32_t at = (uint32_t)((uint64_t)p * e->count / e->parts);

		e->first[p] = at < e->count ? map->requeue[(tail + at) & mask] : SHMQ_NONE;
	}
}

int shmq_lease_take(shmq_broker *b, const shmq_lessee *l, uint64_t parent, uint32_t n,
                    uint64_t max_bytes, uint32_t parts, const shmq_run *run, int64_t until,
                    shmq_lease *out)
{
	shmq_lessee_desc *lessee;
	shmq_lease_desc *e;
	shmq_queue_desc *q;
	shmq_map *map;
	uint64_t id;
	uint32_t slot;
	_Atomic uint32_t *head;
	bool more = false;
	span at;
	int r;

	if (!n || !parts || parts > SHMQ_LEASE_PARTS)
		return because(SHMQ_INVALID, "a lease has 1 message or more in 1 to %d parts",
		               SHMQ_LEASE_PARTS);
	r = lessee_lock(b, l, until, &map, &lessee);
	if (r)
		return r;
	q = map->q;
	if (ld(&q->defer_head) != ld_acquire(&q->defer_tail))
		defer_drain(b, map);
	r = run ? run_check(map, run) : 0;
	if (r)
		goto out;
	r = SHMQ_EMPTY;
	if (ld(&q->paused) || (!queue_next(map, &slot, &head, &at) && (!run || lease_has_run(map))))
		goto out;
	e = entry_new(map, &id);
	if (!e) {
		r = because(SHMQ_TABLE_FULL, "%d leases of this channel are open", SHMQ_LEASES);
		goto out;
	}
	st(&q->lease_id, id);
	e->parent = parent;
	e->bytes = 0;
	e->on_disk = 0;
	e->since = realtime_ns();
	e->lessee = l->index;
	st(&e->replays, 0);
	SHMQ_KILLPOINT("lease.filled");
	st_release(&e->word, WORD(SHMQ_LEASE_TAKING, id));
	SHMQ_KILLPOINT("lease.taking");
	e->count = gather(map, e, id, n, max_bytes);
	e->parts = parts < e->count ? parts : e->count;
	if (run)
		run_take(map, e, id, n, max_bytes, run);
	if (!e->count && !e->on_disk) { /* what there is on disk is too much, or not to be had now */
		st_release(&e->word, 0);
		goto out;
	}
	split(map, e);
	SHMQ_KILLPOINT("lease.gathered");
	st_release(&e->word, WORD(SHMQ_LEASE_HELD, id));
	SHMQ_KILLPOINT("lease.held");
	st(&q->leased, ld(&q->leased) + e->count);
	bump(&q->delivered_on_disk, e->on_disk); /* first: that many slots were not taken */
	bump(&q->delivered, (uint64_t)e->count + e->on_disk);
	deadline_note(b, map);
	more = queue_next(map, &slot, &head, &at);
	describe(e, out);
	r = 0;
out:
	queue_unlock(map);
	if (!r)
		wake_space(b, map);
	else
		spiller_tell(b, map);
	if (more)
		wake_takers(b, map, 1);
	map_release(map);
	return r;
}

/* ---- looking ---- */

int shmq_lease_look(shmq_broker *b, const shmq_lessee *l, uint64_t id, bool replay, int64_t until,
                    shmq_lease *out)
{
	shmq_lessee_desc *lessee;
	shmq_lease_desc *e;
	shmq_map *map;
	int r = lessee_lock(b, l, until, &map, &lessee);

	if (r)
		return r;
	e = held(map, id);
	if (e && e->lessee == l->index) {
		st(&e->replays, ld(&e->replays) + replay);
		describe(e, out);
	} else {
		r = SHMQ_LEASE_LOST;
	}
	lessee_unlock(map);
	return r;
}

int shmq_lease_list(shmq_broker *b, const shmq_lessee *l, shmq_lease *out, uint32_t n,
                    int64_t until, uint32_t *count)
{
	shmq_lessee_desc *lessee;
	shmq_lease_desc *e;
	shmq_map *map;
	uint64_t above = 0;
	int r = lessee_lock(b, l, until, &map, &lessee);

	if (r)
		return r;
	for (*count = 0; *count < n && (e = oldest_of(map, l->index, above)); ++*count) {
		describe(e, &out[*count]);
		above = out[*count].id;
	}
	lessee_unlock(map);
	return 0;
}

/* ---- finish, return ---- */

/* Bites of what is finished, D let go between them; what a lock keeps us from the scan does. */
static void free_finished(shmq_broker *b, shmq_map *map, int64_t until)
{
	for (;;) {
		bool left = false;

		for (uint32_t i = 0; i < SHMQ_LEASES; i++)
			if (LEASE_STATE(ld(&map->leases[i].word)) == SHMQ_LEASE_FINISHED)
				left |= !free_some(map, &map->leases[i], BITE);
		if (left)
			deadline_note(b, map);
		queue_unlock(map);
		wake_space(b, map);
		if (!left || queue_lock(b, map, until))
			return;
	}
}

int shmq_lease_finish(shmq_broker *b, const shmq_lessee *l, uint64_t through, int64_t until,
                      uint64_t *messages)
{
	shmq_lessee_desc *lessee;
	shmq_lease_desc *e;
	shmq_map *map;
	int r = lessee_lock(b, l, until, &map, &lessee);

	if (r)
		return r;
	*messages = 0;
	if (through > ld(&lessee->finished)) {
		e = held(map, through);
		if (!e || e->lessee != l->index)
			r = SHMQ_LEASE_LOST;
	}
	while ((e = oldest_of(map, l->index, 0)) && LEASE_ID(ld(&e->word)) <= through) {
		*messages += (uint64_t)e->count + e->on_disk;
		finish(map, e);
	}
	free_finished(b, map, until);
	if (*messages)
		wake_takers(b, map, WAKE_ALL); /* somebody may wait for what is held to become less */
	map_release(map);
	return r;
}

int shmq_lease_return(shmq_broker *b, const shmq_lessee *l, uint64_t id, int64_t until,
                      uint64_t *messages)
{
	shmq_lessee_desc *lessee;
	shmq_lease_desc *e;
	shmq_map *map;
	int r = lessee_lock(b, l, until, &map, &lessee);

	if (r)
		return r;
	e = held(map, id);
	if (e && e->lessee == l->index) {
		*messages = (uint64_t)e->count + e->on_disk;
		if (!give_back(map, e))
			r = SHMQ_AGAIN;
	} else {
		r = SHMQ_LEASE_LOST;
	}
	queue_unlock(map);
	if (!r)
		wake_takers(b, map, WAKE_ALL);
	spiller_tell(b, map); /* what it held on disk may be read now */
	map_release(map);
	return r;
}

int shmq_lease_end(shmq_broker *b, uint32_t queue, uint64_t serial, uint64_t id, bool back,
                   int64_t until, uint64_t *messages)
{
	shmq_lease_desc *e;
	shmq_map *map;
	int r = usable_status(b);

	if (!r)
		r = map_get_serial(b, queue, serial, &map);
	if (r)
		return r;
	touch(b, queue);
	r = queue_lock(b, map, until);
	if (r)
		goto out;
	e = held(map, id);
	if (!e) {
		queue_unlock(map);
		r = SHMQ_LEASE_LOST;
		goto out;
	}
	*messages = (uint64_t)e->count + e->on_disk;
	if (back) {
		if (!give_back(map, e))
			r = SHMQ_AGAIN;
		queue_unlock(map);
		spiller_tell(b, map);
	} else {
		finish(map, e);
		free_finished(b, map, until);
	}
	wake_takers(b, map, WAKE_ALL);
out:
	map_release(map);
	return r;
}

/* ---- reading, without a lock ---- */

static int reading(shmq_broker *b, uint32_t queue, uint64_t serial, uint64_t id, shmq_map **map,
                   shmq_lease_desc **e)
{
	int r = usable_status(b);

	if (!r)
		r = map_get_serial(b, queue, serial, map);
	if (r)
		return r;
	*e = ld(&(*map)->q->segment.ready) == SHMQ_READY_STATE ? held(*map, id) : NULL;
	if (!*e) {
		map_release(*map);
		return SHMQ_LEASE_LOST;
	}
	fence_acquire();
	return 0;
}

/* Was what has been read until now read of this lease? */
static int still(const shmq_lease_desc *e, uint64_t id)
{
	fence_acquire();
	return ld(&e->word) == WORD(SHMQ_LEASE_HELD, id) ? 0 : SHMQ_LEASE_LOST;
}

int shmq_lease_open(shmq_broker *b, uint32_t queue, uint64_t serial, uint64_t id, uint32_t part,
                    shmq_lease_cursor *out)
{
	shmq_lease_desc *e;
	shmq_map *map;
	uint32_t count, parts;
	const shmq_run_desc *run;
	int r = reading(b, queue, serial, id, &map, &e);

	if (r)
		return r;
	count = e->count;
	parts = e->parts;
	run = &map->q->run;
	if (part >= parts || parts > SHMQ_LEASE_PARTS) {
		r = still(e, id);
		if (!r)
			r = because(SHMQ_INVALID, "lease %llu has %u parts", (unsigned long long)id, parts);
	} else {
		*out = (shmq_lease_cursor){
			.queue = queue,
			.part = part,
			.slot = e->first[part],
			.left = (uint32_t)((uint64_t)(part + 1) * count / parts - (uint64_t)part * count / parts),
			.serial = serial,
			.id = id};
		if (e->on_disk) {
			out->from = run->at[part];
			out->to = part + 1 < parts ? run->at[part + 1] : run->to;
		}
		r = still(e, id);
		if (!r && e->on_disk && ld(&run->lease) != id)
			r = SHMQ_LEASE_LOST; /* the queue was emptied */
	}
	map_release(map);
	return r;
}

/* A slot's body, if it lies where there is memory. Whether it is the lease's is seen afterwards. */
static bool body_at(shmq_map *map, uint32_t slot, const shmq_slot_desc **s, span *at)
{
	uint64_t end = arena_of(map);

	if (!SANE(slot < slots_of(map)))
		return false;
	*s = &map->slots[slot];
	at->length = once((*s)->length);
	at->body = once((*s)->body);
	return SANE(at->body <= end && at->length <= end - at->body);
}

int shmq_lease_measure(shmq_broker *b, const shmq_lease_cursor *c, uint32_t rows, uint64_t bytes,
                       uint32_t *count, uint64_t *size)
{
	const shmq_slot_desc *s;
	shmq_lease_desc *e;
	shmq_map *map;
	uint32_t slot = c->slot;
	span body;
	int r = reading(b, c->queue, c->serial, c->id, &map, &e);

	if (r)
		return r;
	*count = 0;
	*size = 0;
	if (bytes > INT32_MAX)
		bytes = INT32_MAX;
	for (; *count < c->left && *count < rows && body_at(map, slot, &s, &body); slot = s->next) {
		if (*count && *size + body.length > bytes)
			break;
		slots_ahead(map, slot);
		bodies_ahead(map, s);
		*size += body.length;
		++*count;
	}
	r = still(e, c->id);
	map_release(map);
	return r;
}

int shmq_lease_copy(shmq_broker *b, shmq_lease_cursor *c, uint32_t count, uint64_t size,
                    uint64_t *ids, int64_t *timestamps, int32_t *attempts, int32_t *offsets,
                    uint8_t *data)
{
	const shmq_slot_desc *s;
	shmq_lease_desc *e;
	shmq_map *map;
	uint32_t slot = c->slot;
	uint64_t at = 0;
	span body;
	int r = reading(b, c->queue, c->serial, c->id, &map, &e);

	if (r)
		return r;
	for (uint32_t i = 0; i < count; i++) {
		if (!body_at(map, slot, &s, &body) || body.length > size - at) {
			r = SHMQ_LEASE_LOST;
			goto out;
		}
		ids[i] = s->id;
		timestamps[i] = s->timestamp;
		attempts[i] = (uint16_t)(s->attempts + 1);
		offsets[i] = (int32_t)at;
		memcpy(data + at, map->arena + body.body, body.length);
		at += body.length;
		slot = s->next;
	}
	offsets[count] = (int32_t)at;
	r = still(e, c->id);
	if (!r && at != size)
		r = SHMQ_CORRUPT;
	if (!r) {
		c->slot = slot;
		c->left -= count;
	}
out:
	map_release(map);
	return r;
}

/* ---- waiting ---- */

static bool may_lease(shmq_map *map)
{
	shmq_queue_desc *q = map->q;

	if (ld(&q->segment.ready) != SHMQ_READY_STATE || ld(&q->dirty))
		return true;
	if (ld(&q->paused))
		return false;
	return ld(&q->requeue_head) != ld(&q->requeue_tail) ||
	       (ld(&q->ready_head) != ld_acquire(&q->ready_tail) && !on_disk(q) && may_hold_more(map));
}

int shmq_lease_wait(shmq_broker *b, const shmq_lessee *l, int64_t deadline)
{
	shmq_map *map;
	uint32_t bell;
	int r = usable_status(b);

	if (!r)
		r = map_get_serial(b, l->queue, l->serial, &map);
	if (r)
		return r;
	if (bell_get(b, &bell)) { /* more waiters than the table has: poll */
		struct timespec t = timespec_of(2 * NS_PER_MS);

		r = clock_nanosleep(CLOCK_MONOTONIC, 0, &t, NULL) ? SHMQ_INTERRUPTED
		    : now_ns() < deadline                         ? 0
		                                                  : SHMQ_TIMEOUT;
		map_release(map);
		return r;
	}
	wait_announce(&map->q->takers, bell);
	if (!may_lease(map))
		r = bell_sleep(b, bell, deadline, NS_PER_S);
	wait_withdraw(&map->q->takers, bell);
	bell_put(b, bell);
	if (r && may_lease(map))
		wake_takers(b, map, 1); /* a ring meant for us must not be lost with us */
	map_release(map);
	return r;
}
