/*
 * Loans: slots and bodies that a producer fills outside the lock.
 *
 * A slot is LOANED(owner) while it is filled. Id, sequence number and transaction are given when it
 * becomes PREPARED, under the publish lock; the topic's list of queues is read again then.
 * death of the owner: the reaper frees its LOANED slots; a rebuild keeps them.
 */
#include "publish/loan.h"

#include "base/atomics.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "memory/handles.h"
#include "memory/mapping.h"
#include "publish/producer.h"
#include "publish/room.h"
#include "queue/locking.h"
#include "queue/rebuild.h"
#include "queue/slots.h"
#include "shmq.h"
#include "sync/doorbell.h"

#include <stdlib.h>
#include <string.h>

static void loan_release(shmq_loan *loan)
{
	for (uint32_t k = 0; k < loan->made; k++) {
		map_release(loan->lent[k].map);
		free(loan->lent[k].slots);
		free(loan->lent[k].bodies);
	}
	free(loan->lent);
	free(loan->lengths);
	free(loan->blocks);
	free(loan->bodies);
	free(loan->scratch);
	free(loan);
}

static shmq_loan *loan_make(shmq_producer *p, const uint64_t *lengths, const uint32_t *blocks,
                            uint32_t n, uint32_t targets)
{
	shmq_loan *loan = calloc(1, sizeof(*loan));

	if (!loan)
		return NULL;
	loan->p = p;
	loan->n = n;
	loan->lengths = malloc(n * sizeof(*loan->lengths));
	loan->blocks = blocks ? malloc(n * sizeof(*loan->blocks)) : NULL;
	loan->bodies = malloc(n * sizeof(*loan->bodies));
	loan->lent = calloc(targets ? targets : 1, sizeof(*loan->lent));
	if (!loan->lengths || !loan->bodies || !loan->lent || (blocks && !loan->blocks))
		goto fail;
	memcpy(loan->lengths, lengths, n * sizeof(*lengths));
	if (blocks)
		memcpy(loan->blocks, blocks, n * sizeof(*blocks));
	loan->made = targets;
	for (uint32_t k = 0; k < targets; k++) {
		lent *to = &loan->lent[k];

		to->slots = malloc(n * sizeof(*to->slots));
		to->bodies = malloc(n * sizeof(*to->bodies));
		if (!to->slots || !to->bodies)
			goto fail;
		memset(to->slots, 0xff, n * sizeof(*to->slots)); /* SHMQ_NONE */
	}
	return loan;
fail:
	loan_release(loan);
	return NULL;
}

/* Lend the next free slots of a queue. Returns false if its free ring is garbage. */
static bool lend(shmq_loan *loan, shmq_map *map)
{
	lent *to = &loan->lent[loan->targets++];
	uint32_t client = loan->p->b->client;

	map_hold(map);
	to->map = map;
	for (uint32_t i = 0; i < loan->n; i++) {
		shmq_slot_desc *s = free_slot_for(map, i, loan->lengths[i], &to->bodies[i]);

		if (!s)
			return false;
		to->slots[i] = (uint32_t)(s - map->slots);
		s->length = (uint32_t)loan->lengths[i];
		s->flags = 0;
		SHMQ_KILLPOINT("loan.fields");
		/* SYNC(slot-state) */
		st_release(&s->word, SHMQ_WORD(SHMQ_LOANED, client, SHMQ_GENERATION_OF(ld(&s->word))));
		SHMQ_KILLPOINT("loan.state");
	}
	st_release(&map->q->free_head, ld(&map->q->free_head) + loan->n); /* SYNC(free-head) */
	return true;
}

/* Set the buffers that the producer fills. */
static int bodies_set(shmq_loan *loan)
{
	uint64_t all = 0;

	for (uint32_t i = 0; i < loan->n; i++)
		all += loan->lengths[i];
	if (!loan->targets && !(loan->scratch = malloc(all)))
		return SHMQ_NO_MEMORY;
	for (uint64_t i = 0, at = 0; i < loan->n; at += loan->lengths[i++])
		loan->bodies[i] = (shmq_body){loan->targets ? loan->lent[0].bodies[i] : loan->scratch + at,
		                              loan->lengths[i]};
	return 0;
}

/* Make the slots that are LOANED already FREE again, but in no ring: fanout_abort has the rings
 * rebuilt. */
static void loan_undo(shmq_loan *loan)
{
	for (uint32_t k = 0; k < loan->targets; k++) {
		lent *to = &loan->lent[k];

		for (uint32_t i = 0; i < loan->n && to->slots[i] != SHMQ_NONE; i++) {
			_Atomic uint64_t *word = &to->map->slots[to->slots[i]].word;

			if (SHMQ_STATE_OF(ld(word)) == SHMQ_LOANED)
				st_release(word, word_next(ld(word), SHMQ_FREE)); /* SYNC(slot-state) */
		}
	}
	loan_release(loan);
}

int loan_begin(shmq_producer *p, const uint64_t *lengths, const uint32_t *blocks, uint32_t n,
               int64_t due, int64_t until, shmq_loan **out)
{
	uint64_t skip[SKIP_WORDS];
	fanout f = {.p = p, .n = n, .lengths = lengths, .due = due, .skip = skip, .lends = true};
	shmq_loan *loan;
	int r = fanout_lock(&f, until);

	if (r)
		return r;
	loan = loan_make(p, lengths, blocks, n, f.count);
	r = loan ? fanout_room(&f, until) : SHMQ_NO_MEMORY;
	for (uint32_t k = 0; !r && k < f.count; k++)
		if (!fanout_skips(&f, k) && !lend(loan, f.targets[k]))
			r = fanout_abort(&f);
	if (!r)
		r = bodies_set(loan);
	if (!r) {
		loan->open = true;
		broker_hold(p->b);
		*out = loan;
	} else if (loan) {
		loan_undo(loan);
	}
	topic_unlock(p->t);
	return r;
}

int shmq_loan_begin(shmq_producer *p, uint64_t length, int64_t until, shmq_loan **out)
{
	return shmq_loan_begin_on(p, length, NULL, until, out);
}

int shmq_loan_begin_on(shmq_producer *p, uint64_t length, const shmq_body *properties,
                       int64_t until, shmq_loan **out)
{
	shmq_body body = {NULL, length};
	uint64_t lengths[1];
	uint32_t blocks[1] = {0};
	bool large;
	int r = check_bodies(p, &body, 1, lengths, &large);

	if (!r && properties)
		r = check_properties(p, properties, 1, lengths, blocks);
	if (!r)
		r = loan_begin(p, lengths, blocks[0] ? blocks : NULL, 1, 0, until, out);
	if (!r && blocks[0])
		memcpy(loan_body(*out, 0), properties->data, blocks[0]);
	return r;
}

uint8_t *loan_body(shmq_loan *loan, uint32_t i)
{
	return (uint8_t *)(uintptr_t)loan->bodies[i].data; /* shmq_body is for readers */
}

static uint32_t block_of(const shmq_loan *loan)
{
	return loan->blocks ? loan->blocks[0] : 0;
}

void *shmq_loan_data(shmq_loan *loan)
{
	return loan_body(loan, 0) + block_of(loan);
}

void shmq_loan_truncate(shmq_loan *loan, uint64_t length)
{
	loan->lengths[0] = block_of(loan) + length;
}

/* Give back the LOANED slots of targets that were not published to, each target under its deliver
 * lock (D). */
static int loan_give_back(shmq_loan *loan, bool all, int64_t until)
{
	shmq_broker *b = loan->p->b;

	for (uint32_t k = 0; k < loan->targets; k++) {
		lent *to = &loan->lent[k];
		int r;

		if (!all && to->published)
			continue;
		r = queue_lock(b, to->map, until);
		if (r == SHMQ_GONE)
			continue;
		if (r)
			return r;
		for (uint32_t i = 0; i < loan->n; i++)
			if (lent_is_ours(b, to, i))
				slot_release(to->map, to->slots[i]);
		queue_unlock(to->map);
		wake_space(b, to->map);
	}
	return 0;
}

/* Publish. The list of queues is read again: channels that were made since the loan began take a copy,
 * and those that were deleted drop out. */
static int loan_commit(shmq_loan *loan, int64_t due, int64_t until, uint64_t *first_id)
{
	uint64_t skip[SKIP_WORDS];
	const extras more = {.blocks = loan->blocks,
	                     .flags = loan->expires ? SHMQ_SLOT_EXPIRES : 0,
	                     .sealed = loan->p->sealed,
	                     .expires = loan->expires};
	fanout f = {.p = loan->p,
	            .n = loan->n,
	            .lengths = loan->lengths,
	            .bodies = loan->bodies,
	            .extras = loan->blocks || loan->expires || loan->p->sealed ? &more : NULL,
	            .due = due,
	            .skip = skip,
	            .lent = loan->lent,
	            .lent_count = loan->targets};
	int r = fanout_lock(&f, until);

	if (r)
		return r;
	for (uint32_t k = 0; k < loan->targets; k++)
		loan->lent[k].published = false;
	r = fanout_room(&f, until);
	if (!r) {
		fanout_number(&f);
		r = fanout_prepare(&f);
	}
	if (r) {
		topic_unlock(loan->p->t);
		return r;
	}
	fanout_commit(&f);
	SHMQ_KILLPOINT("loan.committed");
	fanout_flip(&f);
	fanout_end(&f);
	*first_id = f.first_id;
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
			memcpy(loan->lent[k].bodies[i], loan->bodies[i].data, loan->lengths[i]);
	r = loan->open ? loan_commit(loan, due, until, id) : SHMQ_CLOSED;
	/* The reaper gives back later all slots that this call cannot give back. */
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
