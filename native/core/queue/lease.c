#include "queue/lease.h"

#include "base/atomics.h"
#include "base/bounds.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "base/status.h"
#include "memory/handles.h"
#include "memory/heap.h"
#include "memory/segment.h"
#include "queue/latency.h"
#include "queue/slots.h"
#include "shmq.h"
#include "sync/doorbell.h"

#include <string.h>

static shmq_lease_desc *entry_of(const shmq_map *map, uint64_t id)
{
	return &map->leases[id % SHMQ_LEASES];
}

bool lease_any(shmq_map *map)
{
	return ld_acquire(&map->q->leases_committed) && /* SYNC(leases-committed) */
	       (TRUST_CHECK(ld(&map->leases_backed)) || !queue_commit_leases(map));
}

shmq_lease_desc *lease_entry(shmq_map *map, uint64_t id)
{
	shmq_lease_desc *e = lease_any(map) ? entry_of(map, id) : NULL;

	return e && id && ld(&e->word) == WORD(SHMQ_LEASE_HELD, id) ? e : NULL;
}

/* The lease's next slot, or NULL if the chain cannot be right. */
static shmq_slot_desc *slot_of(shmq_map *map, const shmq_lease_desc *e, uint32_t slot)
{
	shmq_slot_desc *s;

	if (!slot_is(map, slot, SHMQ_LEASED))
		return NULL;
	s = &map->slots[slot];
	return slot_lease_id(s) == LEASE_ID(ld(&e->word)) ? s : NULL;
}

bool lease_has_run(shmq_map *map)
{
	const shmq_run_desc *run = &map->q->run;

	return lease_entry(map, ld(&run->lease)) &&
	       ld(&map->q->disk_read) == run->from; /* not emptied */
}

/* End the lease's run, if it has one; finished: the read position moves past it. */
static void run_end(shmq_map *map, uint64_t id, bool finished)
{
	shmq_run_desc *run = &map->q->run;
	uint64_t depth = ld(&map->q->disk_depth);

	if (ld(&run->lease) != id)
		return;
	if (finished && ld(&map->q->disk_read) == run->from) {
		st_release(&map->q->disk_read, run->to); /* SYNC(disk-read) */
		SHMQ_KILLPOINT("lease.run_read");
		st(&map->q->disk_depth, depth > run->count ? depth - run->count : 0);
		(void)disk_is_empty(map->q);
	}
	st_release(&run->lease, 0); /* SYNC(lease-on-disk) */
}

int lease_run_check(const shmq_map *map, const shmq_run *run)
{
	shmq_queue_desc *q = map->q;

	if (!run->count || !run->parts || run->parts > SHMQ_LEASE_PARTS || run->from >= run->to)
		return fail(SHMQ_INVALID, "a run has 1 record or more in 1 to %d parts", SHMQ_LEASE_PARTS);
	if (ld(&q->disk_read) != run->from || run->to > ld(&q->disk_write))
		return SHMQ_EMPTY;
	return 0;
}

void lease_run_take(shmq_map *map, shmq_lease_desc *e, uint64_t id, uint32_t n, uint64_t max_bytes,
                    const shmq_run *from)
{
	shmq_queue_desc *q = map->q;
	shmq_run_desc *run = &q->run;

	if (lease_has_run(map) || ld(&q->base_pending) ||
	    ld(&q->requeue_head) != ld(&q->requeue_tail) || from->count > n - e->count)
		return;
	if ((e->count || from->count > 1) &&
	    (e->bytes > max_bytes || from->bytes > max_bytes - e->bytes))
		return;
	st(&run->lease, 0);
	/* SYNC(lease-on-disk) */
	fence_full(); /* a reader of an emptied run sees that before it sees anything of this one */
	run->from = from->from;
	run->to = from->to;
	run->bytes = from->bytes;
	run->count = from->count;
	memcpy(run->at, from->at, from->parts * sizeof(run->at[0]));
	SHMQ_KILLPOINT("lease.run");
	st_release(&run->lease, id); /* SYNC(lease-on-disk) */
	e->on_disk = from->count;
	e->bytes += from->bytes;
	e->parts = from->parts;
}

unsigned lease_resolve(shmq_map *map, shmq_slot_desc *s)
{
	const shmq_lease_desc *e = entry_of(map, slot_lease_id(s));
	uint64_t word = lease_any(map) ? ld(&e->word) : 0;

	if (LEASE_ID(word) == slot_lease_id(s))
		switch (LEASE_STATE(word)) {
		case SHMQ_LEASE_HELD:
			return SHMQ_LEASED;
		case SHMQ_LEASE_FINISHED:
			return SHMQ_PINNED;
		case SHMQ_LEASE_TAKING:
			return s->previous == SHMQ_READY ? SHMQ_READY : SHMQ_REQUEUED;
		case SHMQ_LEASE_RETURNED:
			s->order = e->base + s->turn;
			s->attempts++;
		}
	s->after = 0; /* also slots that no lease lists: garbage, not a death */
	s->pos = SHMQ_NO_POSITION;
	return SHMQ_REQUEUED;
}

void lease_resolved(shmq_map *map)
{
	uint64_t run = ld(&map->q->run.lease);

	if (run && !lease_has_run(map))
		run_end(map, run,
		        lease_any(map) && ld(&entry_of(map, run)->word) == WORD(SHMQ_LEASE_FINISHED, run));
	for (uint32_t i = 0; lease_any(map) && i < SHMQ_LEASES; i++)
		if (LEASE_STATE(ld(&map->leases[i].word)) != SHMQ_LEASE_HELD)
			st_release(&map->leases[i].word, 0); /* SYNC(lease-state) */
}

bool lease_free_some(shmq_map *map, shmq_lease_desc *e, uint32_t most)
{
	int64_t realtime = realtime_ns();
	uint64_t ns, held = latency_since(e->since, realtime);

	while (e->left && most--) {
		uint32_t slot = e->at;
		shmq_slot_desc *s = slot_of(map, e, slot);

		if (!s)
			break; /* garbage: a rebuild would make the rest REQUEUED */
		slots_ahead(map, slot);
		e->at = s->next;
		e->left--;
		ns = latency_since(s->timestamp, realtime);
		latency_record(map->latency, ns, held);
		in_use_remove(map, slot);
		st(&map->q->leased, ld(&map->q->leased) - 1);
		slot_release(map, slot);
		SHMQ_KILLPOINT("lease.freed");
	}
	if (e->left && slot_of(map, e, e->at))
		return false;
	latency_turn(map->latency, realtime);
	st_release(&e->word, 0); /* SYNC(lease-state) */
	return true;
}

void lease_mark_finished(shmq_map *map, shmq_lease_desc *e)
{
	uint64_t id = LEASE_ID(ld(&e->word));
	shmq_lease_holder_desc *holder = &map->lease_holders[e->holder % SHMQ_LEASE_HOLDERS];

	e->at = e->first[0];
	e->left = e->count;
	if (ld(&holder->finished) < id)
		st(&holder->finished, id);
	SHMQ_KILLPOINT("lease.finishing");
	st_release(&e->word, WORD(SHMQ_LEASE_FINISHED, id)); /* SYNC(lease-state) */
	/* SYNC(lease-state) */
	fence_full(); /* a reader that sees any later store sees this one too */
	SHMQ_KILLPOINT("lease.finished");
	run_end(map, id, true);
	bump(&map->q->finished, (uint64_t)e->count + e->on_disk);
}

bool lease_return(shmq_map *map, shmq_lease_desc *e)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->requeue_head), mask = ring_mask_of(map), n = e->count,
			 slot = e->first[0];
	uint64_t id = LEASE_ID(ld(&e->word));
	bool waits = head != ld(&q->requeue_tail);

	if (waits && !slot_is(map, map->requeue[head & mask], SHMQ_REQUEUED)) {
		queue_broken(map);
		return false;
	}
	e->base = (waits ? map->slots[map->requeue[head & mask]].order : ld(&q->order) + 1) - n;
	SHMQ_KILLPOINT("lease.returning");
	st_release(&e->word, WORD(SHMQ_LEASE_RETURNED, id)); /* SYNC(lease-state) */
	/* SYNC(lease-state) */
	fence_full(); /* as in lease_mark_finished */
	SHMQ_KILLPOINT("lease.returned");
	run_end(map, id, false);
	for (uint32_t i = 0; i < n; i++) {
		shmq_slot_desc *s = slot_of(map, e, slot);

		if (!s) {
			queue_broken(map); /* a rebuild salvages it */
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
		st_release(&s->word, word_next(ld(&s->word), SHMQ_REQUEUED)); /* SYNC(slot-state) */
		SHMQ_KILLPOINT("lease.back");
	}
	st_release(&q->requeue_head, head - n); /* SYNC(requeue-head) */
	st(&q->leased, ld(&q->leased) - n);
	bump(&q->returned, (uint64_t)n + e->on_disk);
	st_release(&e->word, 0); /* SYNC(lease-state) */
	return true;
}

/* The lease holder's open lease of the highest id, or NULL. */
static shmq_lease_desc *newest_of(shmq_map *map, uint32_t holder)
{
	shmq_lease_desc *found = NULL;

	for (uint32_t i = 0; i < SHMQ_LEASES; i++) {
		shmq_lease_desc *e = &map->leases[i];

		if (LEASE_STATE(ld(&e->word)) == SHMQ_LEASE_HELD && e->holder == holder &&
		    (!found || ld(&e->word) > ld(&found->word)))
			found = e;
	}
	return found;
}

shmq_lease_desc *lease_oldest(shmq_map *map, uint32_t holder, uint64_t above)
{
	shmq_lease_desc *found = NULL;

	for (uint32_t i = 0; i < SHMQ_LEASES; i++) {
		shmq_lease_desc *e = &map->leases[i];
		uint64_t word = ld(&e->word);

		if (LEASE_STATE(word) == SHMQ_LEASE_HELD && e->holder == holder && LEASE_ID(word) > above &&
		    (!found || word < ld(&found->word)))
			found = e;
	}
	return found;
}

/* Return all of them, the newest first, so that the oldest message ends up in front. */
static uint32_t return_all_of(shmq_map *map, uint32_t holder, uint64_t *messages)
{
	shmq_lease_desc *e;
	uint32_t n = 0;

	while ((e = newest_of(map, holder)) && !ld(&map->q->dirty)) {
		if (!lease_return(map, e))
			break;
		*messages += (uint64_t)e->count + e->on_disk;
		n++;
	}
	return n;
}

void lease_return_all(shmq_map *map)
{
	uint64_t ignored = 0;

	for (uint32_t i = 0; lease_any(map) && i < SHMQ_LEASE_HOLDERS; i++)
		(void)return_all_of(map, i, &ignored);
	for (uint32_t i = 0; lease_any(map) && i < SHMQ_LEASES; i++)
		if (LEASE_STATE(ld(&map->leases[i].word)) == SHMQ_LEASE_FINISHED)
			(void)lease_free_some(map, &map->leases[i], UINT32_MAX);
}

int64_t lease_deadline(shmq_map *map)
{
	int64_t first = INT64_MAX;

	if (!lease_any(map) || (!ld(&map->q->leased) && !ld(&map->q->run.lease)))
		return first;
	for (uint32_t i = 0; i < SHMQ_LEASES; i++) {
		const shmq_lease_desc *e = &map->leases[i];
		unsigned state = LEASE_STATE(ld(&e->word));
		int64_t deadline = ld(&map->lease_holders[e->holder % SHMQ_LEASE_HOLDERS].deadline);

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
			(void)lease_free_some(map, &map->leases[i], limit);
	for (uint32_t i = 0; i < SHMQ_LEASE_HOLDERS; i++) {
		shmq_lease_holder_desc *l = &map->lease_holders[i];
		uint64_t messages = 0;

		if (!ld(&l->state) || ld(&l->deadline) > now)
			continue;
		bump(&l->lost, return_all_of(map, i, &messages));
		*returned += (uint32_t)messages;
	}
}

void lease_orphan(shmq_broker *b, shmq_map *map, uint32_t client)
{
	if (!lease_any(map))
		return;
	for (uint32_t i = 0; i < SHMQ_LEASE_HOLDERS; i++) {
		shmq_lease_holder_desc *l = &map->lease_holders[i];

		if (ld(&l->client) != client + 1)
			continue;
		st(&l->deadline, later(now_ns(), l->grace));
		SHMQ_KILLPOINT("lease.orphaned");
		st(&l->client, 0);
	}
	deadline_note(b, map);
}

int lease_tables_commit(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	int r;

	if (lease_any(map))
		return 0;
	r = queue_commit_leases(map);
	if (!r)
		st_release(&q->leases_committed, 1); /* SYNC(leases-committed) */
	return r;
}

bool lease_none_of(shmq_map *map, uint32_t holder)
{
	return !newest_of(map, holder);
}

uint32_t leases_of(shmq_map *map, uint64_t whose)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < SHMQ_LEASES; i++) {
		const shmq_lease_desc *e = &map->leases[i];

		n += LEASE_STATE(ld(&e->word)) == SHMQ_LEASE_HELD &&
		     map->lease_holders[e->holder % SHMQ_LEASE_HOLDERS].whose == whose;
	}
	return n;
}

/* When a holder with an owner gave its last sign of life, or one without was left. */
static int64_t silent_since(const shmq_lease_holder_desc *l)
{
	int64_t time = ld(&l->client) ? l->ttl : l->grace;

	return time == INT64_MAX ? time : ld(&l->deadline) - time;
}

static void older(shmq_lease_holder_desc **found, shmq_lease_holder_desc *l)
{
	if (!*found || silent_since(l) < silent_since(*found))
		*found = l;
}

shmq_lease_holder_desc *lease_holder_find(shmq_map *map, const shmq_lease_settings *settings)
{
	/* Entries that hold nothing: [0] without an owner, [1] with one that is elsewhere. */
	shmq_lease_holder_desc *unused = NULL, *idle[2] = {NULL}, *mine[2] = {NULL};
	uint32_t n = 0;

	for (uint32_t i = 0; i < SHMQ_LEASE_HOLDERS; i++) {
		shmq_lease_holder_desc *l = &map->lease_holders[i];
		bool owned = ld(&l->client), of_mine = settings->whose && l->whose == settings->whose;

		if (!ld(&l->state)) { /* SYNC(lease-holder) */
			if (!unused)
				unused = l;
			continue;
		}
		if (!strncmp(l->name, settings->name, SHMQ_NAME))
			return l;
		n += of_mine;
		if ((owned && !l->whose) || !lease_none_of(map, i))
			continue;
		older(&idle[owned], l);
		if (of_mine)
			older(&mine[owned], l);
	}
	if (settings->whose && n >= settings->most)
		return mine[0] ? mine[0] : mine[1];
	if (unused)
		return unused;
	return idle[0] ? idle[0] : idle[1];
}

void lease_describe(const shmq_lease_desc *e, shmq_lease *out)
{
	*out = (shmq_lease){.id = LEASE_ID(ld(&e->word)),
	                    .parent = e->parent,
	                    .bytes = e->bytes,
	                    .count = e->count + e->on_disk,
	                    .parts = e->parts,
	                    .replays = ld(&e->replays),
	                    .on_disk = e->on_disk};
}

shmq_lease_desc *lease_entry_new(shmq_map *map, uint64_t *id)
{
	uint64_t last = ld(&map->q->lease_id);

	for (*id = last + 1; *id <= last + SHMQ_LEASES; ++*id) {
		shmq_lease_desc *e = entry_of(map, *id);

		if (LEASE_STATE(ld(&e->word)) == SHMQ_LEASE_FINISHED)
			(void)lease_free_some(map, e, BITE);
		if (!ld(&e->word))
			return e;
	}
	return NULL;
}

uint32_t lease_gather(shmq_broker *b, shmq_map *map, shmq_lease_desc *e, uint64_t id, uint32_t n,
                      uint64_t max_bytes)
{
	shmq_queue_desc *q = map->q;
	uint32_t taken = 0, slot, mask = ring_mask_of(map), tail = ld(&q->requeue_tail);
	shmq_slot_desc *last = NULL;
	_Atomic uint32_t *head;
	int64_t now = 0;
	span at;

	while (taken < n && queue_next(map, &slot, &head, &at)) {
		shmq_slot_desc *s = &map->slots[slot];
		uint64_t word = ld(&s->word);

		if (may_expire(map, s) && expired_away(b, map, slot, head, &now))
			continue;
		if (taken && e->bytes + at.length > max_bytes)
			break;
		slots_ahead(map, slot);
		s->move = id;
		s->turn = taken;
		s->next = SHMQ_NONE;
		s->previous = head == &q->ready_head ? SHMQ_READY : SHMQ_REQUEUED;
		SHMQ_KILLPOINT("lease.fields");
		/* SYNC(slot-state) */
		st_release(&s->word, SHMQ_WORD(SHMQ_LEASED, 0, SHMQ_GENERATION_OF(word) + 1));
		SHMQ_KILLPOINT("lease.state");
		st_release(head, ld(head) + 1); /* SYNC(ready-head) SYNC(requeue-head) */
		SHMQ_KILLPOINT("lease.head");
		if (s->previous == SHMQ_READY) {
			in_use_add(map, slot);
			ready_bytes_left(map, at.length);
		}
		if (last)
			last->next = slot;
		last = s;
		map->requeue[(tail + taken++) & mask] = slot;
		e->bytes += at.length;
	}
	return taken;
}

void lease_split(shmq_map *map, shmq_lease_desc *e)
{
	uint32_t tail = ld(&map->q->requeue_tail), mask = ring_mask_of(map);

	for (uint32_t p = 0; p < e->parts; p++) {
		uint32_t at = (uint32_t)((uint64_t)p * e->count / e->parts);

		e->first[p] = at < e->count ? map->requeue[(tail + at) & mask] : SHMQ_NONE;
	}
}

void deadline_note(shmq_broker *b, shmq_map *map)
{
	int64_t first = heap_first(&map->in_flight), leases = lease_deadline(map);

	if (leases < first)
		first = leases;
	if (first < ld(&b->next_deadline[map->index])) {
		st(&b->next_deadline[map->index], first);
		scanner_ring(b, first, INT64_MAX);
	}
}
