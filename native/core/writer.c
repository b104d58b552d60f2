/*
 * Writers: producers that publish in epochs and may have to repeat one (shmq.h, shmq_publish_once).
 *
 *   begin    find the writer's entry, or make one: `topic` with BEING_MADE, the key, `topic`
 *   prepare  next_epoch, next_rows, then next_seq = the last seq of this publish
 *   (the topic's commit word is stored: publish and mark are both there)
 *   commit   epoch, rows, then next_seq = 0
 *
 * A death before the commit word leaves next_seq above it; a death after it leaves next_seq at or
 * below it. The repair of the topic, which comes before any seq is given again, discards the former
 * and completes the latter. The publish lock (P) of the topic protects all of this except claiming
 * a free entry, for which publishers of two topics may race (hence the compare-and-swap).
 */
#include "writer.h"

#include "atomics.h"
#include "handles.h"
#include "killpoint.h"
#include "shmq.h"
#include "status.h"

#define BEING_MADE UINT64_C(0x80000000)

static uint64_t name_of(const shmq_broker *b, uint32_t topic)
{
	return (uint64_t)(topic + 1) | (uint64_t)ld(&b->topics[topic].generation) << 32;
}

static void settle(const shmq_broker *b, uint32_t topic, shmq_writer_desc *w)
{
	uint64_t seq = ld(&w->next_seq); /* SYNC(sequence-pending) */

	if (seq && seq <= ld(&b->topics[topic].committed)) {
		w->epoch = w->next_epoch;
		w->rows = w->next_rows;
		SHMQ_KILLPOINT("writer.settled");
	}
	st_release(&w->next_seq, 0); /* SYNC(sequence-pending) */
}

void writer_recover(shmq_broker *b, uint32_t topic)
{
	for (uint32_t i = 0; i < SHMQ_WRITERS; i++)
		if (ld(&b->writers[i].topic) == name_of(b, topic)) /* SYNC(writer-name) */
			settle(b, topic, &b->writers[i]);
}

/* Returns true if the entry is free, or its topic is gone, or a process that died under this
 * topic's P was making it. */
static bool unused(const shmq_broker *b, uint64_t name, uint64_t mine)
{
	uint32_t topic = (uint32_t)(name & 0xffff) - 1;

	if (!name || name == (mine | BEING_MADE))
		return true;
	return topic >= SHMQ_TOPICS || ld(&b->topics[topic].generation) != name >> 32;
}

static shmq_writer_desc *entry_make(shmq_broker *b, uint64_t mine, const shmq_sequence *mark,
                                    shmq_writer_desc *oldest)
{
	shmq_writer_desc *w = NULL;

	for (uint32_t i = 0; i < SHMQ_WRITERS && !w; i++) {
		uint64_t name = ld(&b->writers[i].topic);

		if (unused(b, name, mine) &&
		    atomic_compare_exchange_strong(&b->writers[i].topic, &name, mine | BEING_MADE))
			w = &b->writers[i];
	}
	if (!w) {
		if (!oldest)
			return NULL;
		w = oldest;
		st_release(&w->topic, mine | BEING_MADE); /* SYNC(writer-name) */
	}
	SHMQ_KILLPOINT("writer.being_made");
	w->key[0] = mark->key[0];
	w->key[1] = mark->key[1];
	w->epoch = w->rows = 0;
	st(&w->next_seq, 0);
	SHMQ_KILLPOINT("writer.filled");
	st_release(&w->topic, mine); /* SYNC(writer-name) */
	return w;
}

int writer_begin(shmq_broker *b, uint32_t topic, const shmq_sequence *mark, shmq_writer_desc **out)
{
	uint64_t mine = name_of(b, topic), used = 0;
	shmq_writer_desc *w = NULL, *oldest = NULL;

	for (uint32_t i = 0; i < SHMQ_WRITERS; i++) {
		shmq_writer_desc *at = &b->writers[i];

		if (ld(&at->topic) != mine)
			continue;
		if (at->used > used)
			used = at->used;
		if (!oldest || at->used < oldest->used)
			oldest = at;
		if (at->key[0] == mark->key[0] && at->key[1] == mark->key[1])
			w = at;
	}
	if (!w)
		w = entry_make(b, mine, mark, oldest);
	if (!w)
		return fail(SHMQ_TABLE_FULL, "%d writers publish in epochs already", SHMQ_WRITERS);
	w->used = used + 1;
	*out = w;
	if (mark->epoch + 1 < w->epoch)
		return SHMQ_REPEATED;
	if (mark->epoch + 1 == w->epoch && mark->upto <= w->rows)
		return SHMQ_REPEATED;
	if (mark->after != (mark->epoch + 1 == w->epoch ? w->rows : 0))
		return fail(SHMQ_INVALID, "messages from number %llu on of the epoch, but %llu are there",
		            (unsigned long long)mark->after,
		            (unsigned long long)(mark->epoch + 1 == w->epoch ? w->rows : 0));
	return 0;
}

void writer_prepare(shmq_writer_desc *w, const shmq_sequence *mark, uint64_t seq)
{
	w->next_epoch = mark->epoch + 1;
	w->next_rows = mark->upto;
	SHMQ_KILLPOINT("writer.next");
	st_release(&w->next_seq, seq); /* SYNC(sequence-pending) */
	SHMQ_KILLPOINT("writer.prepared");
}

void writer_commit(shmq_writer_desc *w)
{
	w->epoch = w->next_epoch;
	w->rows = w->next_rows;
	SHMQ_KILLPOINT("writer.committed");
	st_release(&w->next_seq, 0); /* SYNC(sequence-pending) */
}
