/*
 * Loans: slots and bodies that a producer fills outside the lock.
 *
 * A slot is LOANED(owner) while it is filled. Id, sequence number and transaction are given when it
 * becomes PREPARED, under the publish lock; the topic's list of queues is read again then.
 * death of the owner: the reaper frees its LOANED slots; a rebuild keeps them.
 */
#include "loan.h"

#include "atomics.h"
#include "clock.h"
#include "doorbell.h"
#include "handles.h"
#include "killpoint.h"
#include "locking.h"
#include "mapping.h"
#include "producer.h"
#include "rebuild.h"
#include "room.h"
#include "shmq.h"
#include "slots.h"

#include <stdlib.h>
#include <string.h>

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

/* Make the slots that are LOANED already FREE again, in no ring; fanout_abort has the rings
 * rebuilt. */
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

int loan_begin(shmq_producer *p, const uint64_t *lengths, uint32_t n, bool deferred, int64_t until,
               shmq_loan **out)
{
	shmq_broker *b = p->b;
	shmq_map **targets;
	shmq_loan *loan = NULL;
	uint64_t skip[SKIP_WORDS], all = 0;
	uint32_t count, lent = 0;
	int r = producer_lock(p, until, &targets, &count);

	if (r)
		return r;
	fanout_skip_none(skip, count);
	loan = loan_make(p, lengths, n, count);
	r = loan ? fanout_room(p, targets, count, lengths, n, deferred, until, skip)
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
				return fanout_abort(p->t);
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

uint8_t *loan_body(shmq_loan *loan, uint32_t target, uint32_t i)
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

/* Give back the LOANED slots of targets that are not, or no longer, published to, each under its
 * D. */
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

/* hint: its index if no channel was made or deleted since. */
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
	fanout_skip_none(skip, count);
	/* Channels that were made since the loan began need room now. */
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
	clock = fanout_clock(t, n, now);
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
				(void)fanout_abort(t);
				return queue_corrupt(targets[k]);
			}
			if (!s)
				return fanout_abort(t);
			if (!lent)
				memcpy(body,
				       loan->targets ? loan_body(loan, 0, (uint32_t)i)
				                     : loan->scratch + at,
				       loan->lengths[i]);
			at += loan->lengths[i];
			fanout_prepare(s, message_id(b, clock + i), seq + i, now, due, loan->lengths[i]);
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
			fanout_flip(b, targets[k], lent ? lent->slots : NULL, ld(&targets[k]->q->free_head) - n, n,
			     due, bytes);
		if (!due)
			wake_takers(b, targets[k], n); /* under P: rare and large enough not to matter */
		ring |= fanout_overflows(b, targets[k], n, due != 0);
	}
	ring |= fanout_pumps(p, targets);
	bump(&t->messages, n);
	bump(&t->bytes, bytes);
	topic_unlock(t);
	if (ring)
		supervisor_ring(b, RING_SPILLER);
	*first_id = message_id(b, clock);
	loan->open = false;
	return 0;
}

int shmq_loan_commit(shmq_loan *loan, int64_t due, int64_t until, uint64_t *id)
{
	int r;

	if (loan->open && (r = check_due(loan->p, due)))
		return r;
	/* Copy the first body to the others, outside the lock, because it may be long. */
	for (uint32_t k = 1; loan->open && k < loan->targets; k++)
		for (uint32_t i = 0; i < loan->n; i++)
			memcpy(loan_body(loan, k, i), loan_body(loan, 0, i), loan->lengths[i]);
	r = loan->open ? loan_commit(loan, due, until, id) : SHMQ_CLOSED;
	/* The reaper gives back later what is not given back here; try hard now. */
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
