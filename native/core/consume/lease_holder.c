/*
 * The holder of leases: a name that outlives processes, and the calls made under that name.
 * lease.c has the states of a lease and the effects of a death in each.
 */
#include "base/atomics.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "base/process.h"
#include "base/status.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "memory/segment.h"
#include "queue/lease.h"
#include "queue/locking.h"
#include "queue/settings.h"
#include "queue/slots.h"
#include "shmq.h"
#include "sync/doorbell.h"

#include <string.h>

/* Another incarnation than the one before; 0 if the kernel gives no random bits. */
static uint64_t incarnation_new(uint64_t before)
{
	uint64_t random[2];

	do
		if (!random_bits(random))
			return 0;
	while (!random[0] || random[0] == before);
	return random[0];
}

/* Whether the caller may become the owner of a name that is known. */
static bool may_open(shmq_map *map, const shmq_lease_holder_desc *l,
                     const shmq_lease_settings *settings)
{
	if (!settings->whose)
		return true;
	if (settings->known && l->whose == settings->whose)
		return true;
	if ((l->proof[0] | l->proof[1]) && l->proof[0] == settings->proof[0] &&
	    l->proof[1] == settings->proof[1])
		return true;
	return (!ld(&l->client) || ld(&l->deadline) <= now_ns()) &&
	       lease_none_of(map, (uint32_t)(l - map->lease_holders));
}

/* Store the owner in the entry, which is the name's already or is given to it now. */
static void holder_fill(shmq_broker *b, shmq_lease_holder_desc *l,
                        const shmq_lease_settings *settings, uint64_t incarnation)
{
	const shmq_client_desc *client = &b->clients[b->client];
	const char *name = settings->name;

	if (!ld(&l->state) || strncmp(l->name, name, SHMQ_NAME)) {
		st_release(&l->state, 0); /* SYNC(lease-holder) */
		memset(l->name, 0, sizeof(l->name));
		memcpy(l->name, name, strlen(name));
		st(&l->finished, 0);
		st(&l->lost, 0);
	}
	l->ttl = settings->ttl_ns > 0 ? settings->ttl_ns : INT64_MAX;
	l->grace = settings->grace_ns > 0 ? settings->grace_ns : INT64_MAX;
	l->pid = client->pid;
	l->start_time = client->start_time;
	l->proof[0] = settings->proof[0];
	l->proof[1] = settings->proof[1];
	l->whose = settings->whose;
	st(&l->deadline, later(now_ns(), l->ttl));
	st(&l->incarnation, incarnation);
	SHMQ_KILLPOINT("holder.filled");
	st(&l->client, b->client + 1);
	st_release(&l->state, 1); /* SYNC(lease-holder) */
}

int shmq_lease_holder_open(shmq_broker *b, uint32_t queue, uint64_t serial,
                           const shmq_lease_settings *settings, int64_t until,
                           shmq_lease_holder *out)
{
	const char *name = settings->name;
	shmq_lease_holder_desc *l;
	uint64_t incarnation;
	shmq_map *map;
	int r = usable_status(b);

	if (!r && (!*name || strlen(name) >= SHMQ_NAME))
		r = fail(SHMQ_INVALID, "a lease holder's name has 1 to %d bytes", SHMQ_NAME - 1);
	if (!r)
		r = queue_enter_serial(b, queue, serial, until, &map);
	if (r)
		return r;
	r = lease_tables_commit(map);
	l = r ? NULL : lease_holder_find(map, settings);
	if (!r && !l)
		r = fail(SHMQ_TABLE_FULL,
		         "%d names lease from this channel already; close a holder that is not "
		         "needed, or wait until its time to live is over",
		         settings->whose ? (int)settings->most : SHMQ_LEASE_HOLDERS);
	if (!r && ld(&l->state) && !strncmp(l->name, name, SHMQ_NAME) && !may_open(map, l, settings))
		r = SHMQ_LEASE_FENCED;
	incarnation = r ? 0 : incarnation_new(ld(&l->incarnation));
	if (!r && !incarnation)
		r = fail(SHMQ_NO_MEMORY, "the kernel gives no random bits");
	if (!r) {
		holder_fill(b, l, settings, incarnation);
		*out = (shmq_lease_holder){.queue = queue,
		                           .index = (uint32_t)(l - map->lease_holders),
		                           .serial = serial,
		                           .incarnation = incarnation};
	}
	queue_unlock(map);
	map_release(map);
	return r;
}

/* Take the queue's deliver lock (D) and note a sign of life, if the lease holder is still the
 * newest of its name. */
static int lease_holder_lock(shmq_broker *b, const shmq_lease_holder *l, int64_t until,
                             shmq_map **out, shmq_lease_holder_desc **holder)
{
	shmq_map *map;
	int r = queue_enter_serial(b, l->queue, l->serial, until, &map);

	if (r)
		return r;
	*holder = &map->lease_holders[l->index % SHMQ_LEASE_HOLDERS];
	if (!lease_any(map) || !ld(&(*holder)->state) ||
	    ld(&(*holder)->incarnation) != l->incarnation) {
		queue_unlock(map);
		map_release(map);
		return SHMQ_LEASE_FENCED;
	}
	if (ld(&(*holder)->client))
		st(&(*holder)->deadline, later(now_ns(), (*holder)->ttl));
	*out = map;
	return 0;
}

static void lease_holder_unlock(shmq_map *map)
{
	queue_unlock(map);
	map_release(map);
}

int shmq_lease_holder_touch(shmq_broker *b, const shmq_lease_holder *l, int64_t until)
{
	shmq_lease_holder_desc *holder;
	shmq_map *map;
	int r = lease_holder_lock(b, l, until, &map, &holder);

	if (!r)
		lease_holder_unlock(map);
	return r;
}

int shmq_lease_holder_adopt(shmq_broker *b, const shmq_lease_holder *l, int64_t until)
{
	const shmq_client_desc *client = &b->clients[b->client];
	shmq_lease_holder_desc *holder;
	shmq_map *map;
	int r = lease_holder_lock(b, l, until, &map, &holder);

	if (r)
		return r;
	if (ld(&holder->client) != b->client + 1) {
		st(&holder->deadline, later(now_ns(), holder->ttl)); /* it may have had no owner */
		holder->pid = client->pid;
		holder->start_time = client->start_time;
		st(&holder->client, b->client + 1);
	}
	lease_holder_unlock(map);
	return 0;
}

int shmq_lease_holder_close(shmq_broker *b, const shmq_lease_holder *l, int64_t until)
{
	shmq_lease_holder_desc *holder;
	shmq_map *map;
	int r = lease_holder_lock(b, l, until, &map, &holder);

	if (r)
		return r;
	st(&holder->deadline, later(now_ns(), holder->grace));
	st(&holder->client, 0);
	deadline_note(b, map);
	lease_holder_unlock(map);
	return 0;
}

int shmq_lease_holder_leave(shmq_broker *b, const shmq_lease_holder *l, int64_t until)
{
	shmq_lease_holder_desc *holder;
	shmq_map *map;
	int r = queue_enter_serial(b, l->queue, l->serial, until, &map);

	if (r)
		return r;
	holder = &map->lease_holders[l->index % SHMQ_LEASE_HOLDERS];
	if (!lease_any(map) || !ld(&holder->state) || ld(&holder->incarnation) != l->incarnation) {
		r = SHMQ_LEASE_FENCED;
	} else if (ld(&holder->client) == b->client + 1) {
		st(&holder->deadline, later(now_ns(), holder->grace));
		SHMQ_KILLPOINT("holder.left");
		st(&holder->client, 0);
		deadline_note(b, map);
	}
	lease_holder_unlock(map);
	return r;
}

/* Take messages, and the run, into a new lease. */
static int lease_fill(shmq_broker *b, shmq_map *map, const shmq_lease_holder *l,
                      const shmq_lease_wish *wish, shmq_lease_desc **out)
{
	shmq_queue_desc *q = map->q;
	uint64_t id;
	shmq_lease_desc *e = lease_entry_new(map, &id);

	if (!e)
		return fail(SHMQ_TABLE_FULL, "%d leases of this channel are open", SHMQ_LEASES);
	st(&q->lease_id, id);
	e->parent = wish->parent;
	e->bytes = 0;
	e->on_disk = 0;
	e->since = realtime_ns();
	e->holder = l->index;
	st(&e->replays, 0);
	SHMQ_KILLPOINT("lease.filled");
	st_release(&e->word, WORD(SHMQ_LEASE_TAKING, id)); /* SYNC(lease-state) */
	SHMQ_KILLPOINT("lease.taking");
	e->count = lease_gather(b, map, e, id, wish->n, wish->max_bytes);
	e->parts = wish->parts < e->count ? wish->parts : e->count;
	if (wish->run)
		lease_run_take(map, e, id, wish->n, wish->max_bytes, wish->run);
	if (!e->count && !e->on_disk) { /* the run on disk is too much, or cannot be leased now */
		st_release(&e->word, 0);    /* SYNC(lease-state) */
		return SHMQ_EMPTY;
	}
	lease_split(map, e);
	SHMQ_KILLPOINT("lease.gathered");
	st_release(&e->word, WORD(SHMQ_LEASE_HELD, id)); /* SYNC(lease-state) */
	SHMQ_KILLPOINT("lease.held");
	st(&q->leased, ld(&q->leased) + e->count);
	/* First, so that slots taken plus this counter are never below `delivered`. */
	bump(&q->delivered_on_disk, e->on_disk);
	bump(&q->delivered, (uint64_t)e->count + e->on_disk);
	*out = e;
	return 0;
}

int shmq_lease_take(shmq_broker *b, const shmq_lease_holder *l, const shmq_lease_wish *wish,
                    int64_t until, shmq_lease *out)
{
	shmq_lease_wish some = *wish;
	shmq_lease_holder_desc *holder;
	shmq_lease_desc *e = NULL;
	shmq_queue_desc *q;
	shmq_map *map;
	uint32_t slot;
	_Atomic uint32_t *head;
	bool more = false;
	span at;
	int r;

	if (!wish->n || !wish->parts || wish->parts > SHMQ_LEASE_PARTS)
		return fail(SHMQ_INVALID, "a lease has 1 message or more in 1 to %d parts",
		            SHMQ_LEASE_PARTS);
	r = lease_holder_lock(b, l, until, &map, &holder);
	if (r)
		return r;
	if (wish->most && holder->whose && leases_of(map, holder->whose) >= wish->most) {
		lease_holder_unlock(map);
		return fail(SHMQ_TABLE_FULL, "this client has %u leases of this channel open", wish->most);
	}
	q = map->q;
	if (ld(&q->defer_head) != ld_acquire(&q->defer_tail)) /* SYNC(defer-tail) */
		defer_drain(b, map);
	if (has_policy(map, SHMQ_POLICY_EXPIRY))
		some.run = NULL; /* its readers would not see which of its records have expired */
	r = some.run ? lease_run_check(map, some.run) : 0;
	if (!r && (ld(&q->paused) ||
	           (!queue_next(map, &slot, &head, &at) && (!some.run || lease_has_run(map)))))
		r = SHMQ_EMPTY;
	if (!r)
		r = lease_fill(b, map, l, &some, &e);
	if (!r) {
		deadline_note(b, map);
		more = queue_next(map, &slot, &head, &at);
		lease_describe(e, out);
	}
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

int shmq_lease_look(shmq_broker *b, const shmq_lease_holder *l, uint64_t id, bool replay,
                    int64_t until, shmq_lease *out)
{
	shmq_lease_holder_desc *holder;
	shmq_lease_desc *e;
	shmq_map *map;
	int r = lease_holder_lock(b, l, until, &map, &holder);

	if (r)
		return r;
	e = lease_entry(map, id);
	if (e && e->holder == l->index) {
		st(&e->replays, ld(&e->replays) + replay);
		lease_describe(e, out);
	} else {
		r = SHMQ_LEASE_LOST;
	}
	lease_holder_unlock(map);
	return r;
}

int shmq_lease_list(shmq_broker *b, const shmq_lease_holder *l, shmq_lease *out, uint32_t n,
                    int64_t until, uint32_t *count)
{
	shmq_lease_holder_desc *holder;
	shmq_lease_desc *e;
	shmq_map *map;
	uint64_t above = 0;
	int r = lease_holder_lock(b, l, until, &map, &holder);

	if (r)
		return r;
	for (*count = 0; *count < n && (e = lease_oldest(map, l->index, above)); ++*count) {
		lease_describe(e, &out[*count]);
		above = out[*count].id;
	}
	lease_holder_unlock(map);
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

int shmq_lease_finish(shmq_broker *b, const shmq_lease_holder *l, uint64_t through, int64_t until,
                      uint64_t *messages)
{
	shmq_lease_holder_desc *holder;
	shmq_lease_desc *e;
	shmq_map *map;
	int r = lease_holder_lock(b, l, until, &map, &holder);

	if (r)
		return r;
	*messages = 0;
	if (through > ld(&holder->finished)) {
		e = lease_entry(map, through);
		if (!e || e->holder != l->index)
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

int shmq_lease_return(shmq_broker *b, const shmq_lease_holder *l, uint64_t id, int64_t until,
                      uint64_t *messages)
{
	shmq_lease_holder_desc *holder;
	shmq_lease_desc *e;
	shmq_map *map;
	int r = lease_holder_lock(b, l, until, &map, &holder);

	if (r)
		return r;
	e = lease_entry(map, id);
	if (e && e->holder == l->index) {
		*messages = (uint64_t)e->count + e->on_disk;
		if (!lease_return(map, e))
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
	int r = queue_enter_serial(b, queue, serial, until, &map);

	if (r)
		return r;
	e = lease_entry(map, id);
	if (!e) {
		queue_unlock(map);
		map_release(map);
		return SHMQ_LEASE_LOST;
	}
	*messages = (uint64_t)e->count + e->on_disk;
	if (back) {
		if (!lease_return(map, e))
			r = SHMQ_AGAIN;
		queue_unlock(map);
		spiller_tell(b, map);
	} else {
		lease_mark_finished(map, e);
		free_finished(b, map, until);
	}
	wake_takers(b, map, WAKE_ALL);
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
	       /* SYNC(ready-tail) */
	       (ld(&q->ready_head) != ld_acquire(&q->ready_tail) && !on_disk(q) && may_hold_more(map));
}

int shmq_lease_wait(shmq_broker *b, const shmq_lease_holder *l, int64_t deadline)
{
	shmq_map *map;
	uint32_t bell;
	int r = usable_status(b);

	if (!r)
		r = map_get_serial(b, l->queue, l->serial, &map);
	if (r)
		return r;
	if (bell_get(b, &bell)) {
		map_release(map);
		return bell_none(deadline, 2 * NS_PER_MS);
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
