/*
 * The holder of leases: a name that outlives processes, and the calls made under that name.
 * lease.c has the states of a lease and what a death leaves in each.
 */
#include "atomics.h"
#include "clock.h"
#include "doorbell.h"
#include "handles.h"
#include "killpoint.h"
#include "lease.h"
#include "locking.h"
#include "mapping.h"
#include "segment.h"
#include "shmq.h"
#include "slots.h"
#include "status.h"

#include <string.h>

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
	r = lease_tables_commit(map);
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

/* Take the queue's deliver lock (D) and note a sign of life, if the lessee is still the newest
 * of its name. */
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
		if (!lease_any(map) || !ld(&(*lessee)->state) ||
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
	r = run ? lease_run_check(map, run) : 0;
	if (r)
		goto out;
	r = SHMQ_EMPTY;
	if (ld(&q->paused) || (!queue_next(map, &slot, &head, &at) && (!run || lease_has_run(map))))
		goto out;
	e = lease_entry_new(map, &id);
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
	e->count = lease_gather(map, e, id, n, max_bytes);
	e->parts = parts < e->count ? parts : e->count;
	if (run)
		lease_run_take(map, e, id, n, max_bytes, run);
	if (!e->count && !e->on_disk) { /* the run on disk is too much, or cannot be leased now */
		st_release(&e->word, 0);
		goto out;
	}
	lease_split(map, e);
	SHMQ_KILLPOINT("lease.gathered");
	st_release(&e->word, WORD(SHMQ_LEASE_HELD, id));
	SHMQ_KILLPOINT("lease.held");
	st(&q->leased, ld(&q->leased) + e->count);
	bump(&q->delivered_on_disk, e->on_disk); /* first: that many slots are not in the ring any more */
	bump(&q->delivered, (uint64_t)e->count + e->on_disk);
	deadline_note(b, map);
	more = queue_next(map, &slot, &head, &at);
	lease_describe(e, out);
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

int shmq_lease_look(shmq_broker *b, const shmq_lessee *l, uint64_t id, bool replay, int64_t until,
                    shmq_lease *out)
{
	shmq_lessee_desc *lessee;
	shmq_lease_desc *e;
	shmq_map *map;
	int r = lessee_lock(b, l, until, &map, &lessee);

	if (r)
		return r;
	e = lease_is_held(map, id);
	if (e && e->lessee == l->index) {
		st(&e->replays, ld(&e->replays) + replay);
		lease_describe(e, out);
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
	for (*count = 0; *count < n && (e = lease_oldest(map, l->index, above)); ++*count) {
		lease_describe(e, &out[*count]);
		above = out[*count].id;
	}
	lessee_unlock(map);
	return 0;
}

/* Free the finished slots in bites, and release D between them. If a lock is held elsewhere, the
 * supervisor's scan does the rest. */
static void free_finished(shmq_broker *b, shmq_map *map, int64_t until)
{
	for (;;) {
		bool left = false;

		for (uint32_t i = 0; i < SHMQ_LEASES; i++)
			if (LEASE_STATE(ld(&map->leases[i].word)) == SHMQ_LEASE_FINISHED)
				left |= !lease_free_some(map, &map->leases[i], BITE);
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
		e = lease_is_held(map, through);
		if (!e || e->lessee != l->index)
			r = SHMQ_LEASE_LOST;
	}
	while ((e = lease_oldest(map, l->index, 0)) && LEASE_ID(ld(&e->word)) <= through) {
		*messages += (uint64_t)e->count + e->on_disk;
		lease_mark_finished(map, e);
	}
	free_finished(b, map, until);
	if (*messages)
		wake_takers(b, map, WAKE_ALL); /* publishers may wait for room */
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
	e = lease_is_held(map, id);
	if (e && e->lessee == l->index) {
		*messages = (uint64_t)e->count + e->on_disk;
		if (!lease_give_back(map, e))
			r = SHMQ_AGAIN;
	} else {
		r = SHMQ_LEASE_LOST;
	}
	queue_unlock(map);
	if (!r)
		wake_takers(b, map, WAKE_ALL);
	spiller_tell(b, map); /* its records on disk may be read now */
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
	e = lease_is_held(map, id);
	if (!e) {
		queue_unlock(map);
		r = SHMQ_LEASE_LOST;
		goto out;
	}
	*messages = (uint64_t)e->count + e->on_disk;
	if (back) {
		if (!lease_give_back(map, e))
			r = SHMQ_AGAIN;
		queue_unlock(map);
		spiller_tell(b, map);
	} else {
		lease_mark_finished(map, e);
		free_finished(b, map, until);
	}
	wake_takers(b, map, WAKE_ALL);
out:
	map_release(map);
	return r;
}

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
	if (bell_get(b, &bell)) { /* the table of waiters is full: poll */
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
		wake_takers(b, map, 1); /* hand a ring on that was meant for this thread */
	map_release(map);
	return r;
}
