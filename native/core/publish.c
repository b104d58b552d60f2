/*
 * Publishing: fanout.h has the steps. Small bodies are copied under the publish lock (P), large ones
 * outside it, as a loan.
 */
#include "clock.h"
#include "fanout.h"
#include "handles.h"
#include "killpoint.h"
#include "loan.h"
#include "locking.h"
#include "producer.h"
#include "shmq.h"
#include "status.h"
#include "writer.h"

#include <stdlib.h>
#include <string.h>

static int publish_small(shmq_producer *p, const shmq_body *bodies, const uint64_t *lengths,
                         uint32_t n, int64_t due, const shmq_sequence *mark, int64_t until,
                         uint64_t *first_id)
{
	uint64_t skip[SKIP_WORDS];
	fanout f = {.p = p, .n = n, .lengths = lengths, .bodies = bodies, .due = due, .skip = skip};
	shmq_writer_desc *writer = NULL;
	int r = fanout_lock(&f, until);

	if (r)
		return r;
	if (mark)
		r = writer_begin(p->b, p->topic, mark, &writer);
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
		writer_prepare(writer, mark, f.seq + n - 1);
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
static int publish_large(shmq_producer *p, const shmq_body *bodies, const uint64_t *lengths,
                         uint32_t n, int64_t due, int64_t until, uint64_t *first_id)
{
	shmq_loan *loan;
	int r = loan_begin(p, lengths, n, due, until, &loan);

	if (r)
		return r;
	for (uint32_t i = 0; i < n; i++)
		memcpy(loan_body(loan, i), bodies[i].data, lengths[i]);
	/* Wait a little, so that the copy is not thrown away for a lock that is busy just now. */
	r = shmq_loan_commit(loan, due, later(now_ns(), NS_PER_S / 10), first_id);
	if (r)
		(void)shmq_loan_cancel(loan, later(now_ns(), NS_PER_S));
	shmq_loan_free(loan);
	return r;
}

static int publish(shmq_producer *p, const shmq_body *bodies, uint32_t n, int64_t due,
                   const shmq_sequence *mark, int64_t until, uint64_t *first_id)
{
	uint64_t few[256], *lengths = n <= 256 ? few : malloc(n * sizeof(uint64_t));
	bool large;
	int r;

	if (!lengths)
		return SHMQ_NO_MEMORY;
	error_clear();
	r = check_bodies(p, bodies, n, lengths, &large);
	if (!r)
		r = check_due(p, due);
	if (!r)
		/* Messages with a mark are copied under the lock, large or not, because one commit decides
		 * both. */
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

int shmq_publish_once(shmq_producer *p, const shmq_body *bodies, uint32_t n,
                      const shmq_sequence *mark, int64_t until, uint64_t *first_id)
{
	return publish(p, bodies, n, 0, mark, until, first_id);
}

int shmq_sequence_read(shmq_producer *p, const uint64_t key[2], int64_t until, shmq_sequence *out)
{
	shmq_map **targets;
	shmq_writer_desc *writer;
	uint32_t count;
	int r = producer_lock(p, until, &targets, &count);

	if (r)
		return r;
	*out = (shmq_sequence){.key = {key[0], key[1]}, .epoch = UINT64_MAX - 1};
	r = writer_begin(p->b, p->topic, out, &writer);
	if (!r) {
		out->epoch = writer->epoch;
		out->upto = writer->rows;
	}
	topic_unlock(p->t);
	return r;
}
