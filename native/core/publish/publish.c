/*
 * Publishing: fanout.h has the steps. Small bodies are copied under the publish lock (P), large ones
 * outside it, as a loan.
 */
#include "base/clock.h"
#include "base/killpoint.h"
#include "base/status.h"
#include "memory/handles.h"
#include "publish/fanout.h"
#include "publish/loan.h"
#include "publish/producer.h"
#include "queue/locking.h"
#include "queue/writer.h"
#include "shmq.h"

#include <stdlib.h>
#include <string.h>

/* The messages of one call. */
typedef struct messages {
	const shmq_body *bodies;
	const shmq_terms *terms;
	uint64_t *lengths; /* of the bodies, with their properties */
	uint32_t *blocks;  /* of the properties; NULL: there are none */
	uint32_t n;
} messages;

/* Find or make the writer's entry. If one of another topic gives way, that topic's P is only tried:
 * its holder might want the one that is held here. */
static int writer_enter(shmq_producer *p, const shmq_sequence *mark, shmq_writer_desc **out)
{
	uint32_t other;
	int r = writer_begin(p->b, p->topic, mark, out, &other);

	if (r != SHMQ_AGAIN || other >= SHMQ_TOPICS)
		return r;
	r = topic_lock(p->b, &p->b->topics[other], 0);
	if (r)
		return r;
	writer_give_way(p->b, other, p->topic, mark);
	topic_unlock(&p->b->topics[other]);
	return writer_begin(p->b, p->topic, mark, out, &other);
}

static int publish_small(shmq_producer *p, const messages *m, const shmq_sequence *mark,
                         int64_t until, uint64_t *first_id)
{
	uint64_t skip[SKIP_WORDS];
	const extras more = {.blocks = m->blocks,
	                     .properties = m->blocks ? m->terms->properties : NULL,
	                     .flags = m->terms->expires ? SHMQ_SLOT_EXPIRES : 0,
	                     .sealed = p->sealed,
	                     .expires = m->terms->expires};
	fanout f = {.p = p,
	            .n = m->n,
	            .lengths = m->lengths,
	            .bodies = m->bodies,
	            .extras = m->blocks || m->terms->expires || p->sealed ? &more : NULL,
	            .due = m->terms->due,
	            .skip = skip};
	shmq_writer_desc *writer = NULL;
	int r = fanout_lock(&f, until);

	if (r)
		return r;
	if (mark)
		r = writer_enter(p, mark, &writer);
	if (!r)
		r = fanout_room(&f, until);
	if (!r) {
		fanout_number(&f);
		r = fanout_prepare(&f);
	}
	if (r) {
		topic_unlock(p->t);
		return r;
	}
	if (writer)
		writer_prepare(writer, mark, f.seq + m->n - 1);
	fanout_commit(&f);
	SHMQ_KILLPOINT("publish.committed");
	fanout_flip(&f);
	if (writer)
		writer_commit(writer);
	fanout_end(&f);
	*first_id = f.first_id;
	return 0;
}

/* Publish large bodies: loan them, copy outside the lock, commit them together. */
static int publish_large(shmq_producer *p, const messages *m, int64_t until, uint64_t *first_id)
{
	const shmq_body *properties = m->terms->properties;
	shmq_loan *loan;
	int r = loan_begin(p, m->lengths, m->blocks, m->n, m->terms->due, until, &loan);

	if (r)
		return r;
	loan->expires = m->terms->expires;
	for (uint32_t i = 0; i < m->n; i++) {
		uint8_t *to = loan_body(loan, i);
		uint32_t block = m->blocks ? m->blocks[i] : 0;

		if (block)
			memcpy(to, properties[i].data, block);
		memcpy(to + block, m->bodies[i].data, m->lengths[i] - block);
	}
	/* Wait a little, so that the copy is not thrown away for a lock that is busy just now. */
	r = shmq_loan_commit(loan, m->terms->due, later(now_ns(), NS_PER_S / 10), first_id);
	if (r)
		(void)shmq_loan_cancel(loan, later(now_ns(), NS_PER_S));
	shmq_loan_free(loan);
	return r;
}

static int publish(shmq_producer *p, const shmq_body *bodies, uint32_t n, const shmq_terms *terms,
                   const shmq_sequence *mark, int64_t until, uint64_t *first_id)
{
	uint64_t few[256];
	messages m = {.bodies = bodies,
	              .terms = terms,
	              .lengths = n <= 256 ? few : malloc(n * sizeof(uint64_t)),
	              .blocks = terms->properties ? malloc(n * sizeof(uint32_t)) : NULL,
	              .n = n};
	bool large;
	int r;

	error_clear();
	if (!m.lengths || (terms->properties && !m.blocks))
		r = SHMQ_NO_MEMORY;
	else
		r = check_bodies(p, bodies, n, m.lengths, &large);
	if (!r && m.blocks)
		r = check_properties(p, terms->properties, n, m.lengths, m.blocks);
	if (!r)
		r = check_due(p, terms->due);
	if (!r)
		/* Messages with a mark are copied under the lock, large or not, because one commit decides
		 * both. */
		r = large && !mark ? publish_large(p, &m, until, first_id)
		                   : publish_small(p, &m, mark, until, first_id);
	if (m.lengths != few)
		free(m.lengths);
	free(m.blocks);
	return r;
}

int shmq_publish(shmq_producer *p, const shmq_body *bodies, uint32_t n, int64_t due, int64_t until,
                 uint64_t *first_id)
{
	return publish(p, bodies, n, &(shmq_terms){.due = due}, NULL, until, first_id);
}

int shmq_publish_on(shmq_producer *p, const shmq_body *bodies, uint32_t n, const shmq_terms *terms,
                    int64_t until, uint64_t *first_id)
{
	return publish(p, bodies, n, terms, NULL, until, first_id);
}

int shmq_publish_once(shmq_producer *p, const shmq_body *bodies, uint32_t n,
                      const shmq_terms *terms, const shmq_sequence *mark, int64_t until,
                      uint64_t *first_id)
{
	return publish(p, bodies, n, terms, mark, until, first_id);
}

int shmq_sequence_read(shmq_producer *p, const uint64_t key[2], int64_t until, shmq_sequence *out)
{
	shmq_map **targets;
	const shmq_writer_desc *writer;
	uint32_t count;
	int r = producer_lock(p, until, &targets, &count);

	if (r)
		return r;
	*out = (shmq_sequence){.key = {key[0], key[1]}};
	writer = writer_find(p->b, p->topic, key);
	if (writer) {
		out->epoch = writer->epoch;
		out->upto = writer->rows;
	}
	topic_unlock(p->t);
	return 0;
}
