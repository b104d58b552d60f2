/*
 * Failures, convictions and suspects.
 *
 * A failure is counted by one store of the count together with the generation of the delivery, so a
 * repair that is repeated counts it once. The message whose count reaches max_attempts is convicted:
 * it becomes DEFERRED with the flag CONVICTED, and nobody but the mover (dead.c) touches it again.
 *
 * Order of stores: failures, flags, due time, state word, heaps. The flags CONVICTED and the reason
 * mean something only in a DEFERRED or MOVING slot, so each step that makes a slot DEFERRED stores
 * or clears them before the state.
 */
#include "queue/failure.h"

#include "base/atomics.h"
#include "base/bounds.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "memory/handles.h"
#include "memory/heap.h"
#include "memory/segment.h"
#include "queue/settings.h"
#include "queue/slots.h"
#include "shmq.h"

#define VERDICT ((unsigned)SHMQ_SLOT_CONVICTED | 3u << SHMQ_SLOT_REASON_SHIFT)

uint32_t failures_of(const shmq_slot_desc *s)
{
	return s->flags & SHMQ_SLOT_FAILED ? ld(&s->failures) >> 16 : 0;
}

void failure_count(shmq_slot_desc *s, uint32_t most)
{
	uint32_t delivery = (uint16_t)SHMQ_GENERATION_OF(ld(&s->word)), count = failures_of(s);

	if (s->flags & SHMQ_SLOT_FAILED && (uint16_t)ld(&s->failures) == delivery)
		return;
	/* Never down: after max_attempts was lowered it may be above `most` already. */
	if (count < most)
		count++;
	st(&s->failures, count << 16 | delivery);
	SHMQ_KILLPOINT("fail.counted");
	s->flags |= SHMQ_SLOT_FAILED;
}

/* The delay before the next delivery: it doubles with each failure. A tenth more or less, by the
 * message's id, so that messages that failed together do not come back together. */
static int64_t retry_delay(const shmq_map *map, const shmq_slot_desc *s)
{
	const shmq_settings_desc *p = settings_of(map);
	uint32_t failures = failures_of(s);
	int64_t first = p->retry_first, most = p->retry_most, delay;
	uint64_t mixed = (s->id ^ failures) * UINT64_C(0x9e3779b97f4a7c15);

	if (first <= 0)
		return 0;
	if (most > INT64_MAX / 2)
		most = INT64_MAX / 2;
	delay = first < most ? first : most;
	for (uint32_t i = 1; i < failures && delay < most; i++)
		delay = delay <= most / 2 ? 2 * delay : most;
	return delay - delay / 10 + (delay / 1000 + 1) * (int64_t)((mixed >> 40) % 200);
}

/* Store what a slot needs to be DEFERRED, then its state, and move it to the other heap. */
static void defer(shmq_broker *b, shmq_map *map, uint32_t slot, unsigned verdict, int64_t due)
{
	shmq_slot_desc *s = &map->slots[slot];

	s->flags = (uint8_t)((s->flags & ~VERDICT) | verdict);
	s->deadline = due;
	SHMQ_KILLPOINT("requeue.due");
	st_release(&s->word, word_next(ld(&s->word), SHMQ_DEFERRED)); /* SYNC(slot-state) */
	SHMQ_KILLPOINT("requeue.state");
	heap_remove(&map->in_flight, slot);
	SHMQ_KILLPOINT("requeue.heap");
	heap_push(&map->deferred, due, slot);
	due_note(b, map->index, due);
}

void slot_defer(shmq_broker *b, shmq_map *map, uint32_t slot, int64_t due)
{
	defer(b, map, slot, 0, due);
}

void slot_convict(shmq_broker *b, shmq_map *map, uint32_t slot, unsigned reason, int64_t due)
{
	shmq_slot_desc *s = &map->slots[slot];
	uint32_t owner = SHMQ_OWNER_OF(ld(&s->word));

	s->flags &= (uint8_t)~SHMQ_SLOT_SUSPECT;
	s->previous = SHMQ_IN_FLIGHT;
	s->turn = owner < clients_of(b) ? (uint32_t)b->clients[owner].pid : 0;
	s->after = (uint64_t)realtime_ns();
	defer(b, map, slot, SHMQ_SLOT_CONVICTED | reason << SHMQ_SLOT_REASON_SHIFT, due);
}

void slot_acquit(shmq_broker *b, shmq_map *map, uint32_t slot, uint64_t after, int64_t delay)
{
	const shmq_slot_desc *s = &map->slots[slot];

	if (delay < 0)
		delay = retry_delay(map, s);
	if (delay > 0) {
		slot_defer(b, map, slot, later(realtime_ns(), delay));
		return;
	}
	slot_requeue(map, slot, after);
	SHMQ_KILLPOINT("fail.back");
	heap_remove(&map->in_flight, slot);
}

void slot_give_back(shmq_broker *b, shmq_map *map, uint32_t slot, int64_t delay)
{
	shmq_slot_desc *s = &map->slots[slot];
	shmq_session_desc *its = session_of(map, s);

	if (its)
		session_leave(its);
	if (has_policy(map, SHMQ_POLICY_FAILURES))
		s->flags &= (uint8_t)~SHMQ_SLOT_SUSPECT;
	slot_acquit(b, map, slot, ld(&topic_of(b, map)->committed) + 1, delay);
}

int64_t delay_within(const shmq_broker *b, int64_t delay_ns)
{
	int64_t most = b->d->limits.max_req_timeout;

	return delay_ns < 0 ? 0 : delay_ns > most ? most : delay_ns;
}

void slot_take_back(shmq_broker *b, shmq_map *map, uint32_t slot, uint64_t after, int64_t delay)
{
	const shmq_slot_desc *s = &map->slots[slot];
	uint32_t most = settings_of(map)->max_attempts;

	if (most && failures_of(s) >= most)
		slot_convict(b, map, slot, SHMQ_DEAD_ATTEMPTS, SHMQ_DUE_CONVICTED);
	else
		slot_acquit(b, map, slot, after, delay);
}

void slot_fail(shmq_broker *b, shmq_map *map, uint32_t slot, uint64_t after, int64_t delay)
{
	shmq_slot_desc *s = &map->slots[slot];

	failure_count(s, MOST_FAILURES);
	s->flags &= (uint8_t)~SHMQ_SLOT_SUSPECT;
	slot_take_back(b, map, slot, after, delay);
}

/* ---- suspects ---- */

bool suspect_is_next(shmq_map *map)
{
	shmq_queue_desc *q = map->q;
	uint32_t head = ld(&q->requeue_head), slot;

	if (head == ld(&q->requeue_tail))
		return false;
	slot = slot_in(map, &map->requeue[head & ring_mask_of(map)]);
	return once(map->slots[slot].flags) & SHMQ_SLOT_SUSPECT;
}

/* Returns true if the suspect that was handed out last to this session is still in flight to it. */
static bool holds_suspect(shmq_map *map, uint32_t session)
{
	const shmq_session_desc *its = &map->sessions[session];
	uint32_t slot = ld(&its->suspect) - 1;
	const shmq_slot_desc *s;
	uint64_t word;

	if (!ld(&its->suspect) || !ld(&its->client) || slot >= slots_of(map))
		return false;
	s = &map->slots[slot];
	word = ld(&s->word);
	return SHMQ_STATE_OF(word) == SHMQ_IN_FLIGHT && SHMQ_OWNER_OF(word) + 1 == ld(&its->client) &&
	       once(s->session) == session && once(s->flags) & SHMQ_SLOT_SUSPECT;
}

static bool is_gateway(const shmq_broker *b)
{
	return b->clients[b->client].kind == SHMQ_AS_GATEWAY;
}

bool suspect_may_go(shmq_broker *b, shmq_map *map, uint32_t session)
{
	uint32_t n = sessions_of(map);

	if (ld(&map->sessions[session].in_flight))
		return false;
	for (uint32_t i = 0; i < n && !is_gateway(b); i++)
		if (ld(&map->sessions[i].client) == b->client + 1 && ld(&map->sessions[i].in_flight))
			return false;
	return true;
}

void suspects_forget(shmq_map *map)
{
	uint32_t n = sessions_of(map);

	for (uint32_t i = 0; i < n; i++)
		if (holds_suspect(map, i))
			return;
	st(&map->q->suspects, 0);
}

bool suspect_bars(shmq_broker *b, shmq_map *map, uint32_t session)
{
	uint32_t n = ld(&map->q->suspects) ? sessions_of(map) : 0;

	if (n && holds_suspect(map, session))
		return true;
	for (uint32_t i = 0; i < n && !is_gateway(b); i++)
		if (ld(&map->sessions[i].client) == b->client + 1 && holds_suspect(map, i))
			return true;
	return suspect_is_next(map) && !suspect_may_go(b, map, session);
}

void suspect_note(shmq_map *map, uint32_t session, uint32_t slot)
{
	st(&map->sessions[session].suspect, slot + 1);
	st(&map->q->suspects, 1);
}
