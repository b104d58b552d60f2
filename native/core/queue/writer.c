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
 * a free entry, for which publishers of two topics may race (hence the compare-and-swap). An entry of
 * another topic gives way under that topic's P, which is only tried while this one's is held.
 *
 * A writer that gave way is refused when it comes again, because nothing tells what of it is
 * published. The entry keeps a digest of it, which is stored, under the P of its topic, before the
 * entry goes. A death in between leaves both, and the entry counts.
 */
#include "queue/writer.h"

#include "base/atomics.h"
#include "base/clock.h"
#include "base/killpoint.h"
#include "base/status.h"
#include "memory/handles.h"
#include "shmq.h"

#define BEING_MADE UINT64_C(0x80000000)
#define OF_ONE 64u /* entries of one client on the network */
#define GONE (sizeof(((shmq_writer_desc *)0)->gone) / sizeof(uint64_t)) /* digests of an entry */
#define PLACE_BITS 9 /* twice as many places as entries */
_Static_assert(1 << PLACE_BITS == 2 * SHMQ_WRITERS, "places");

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

/* Returns true if the entry is in use, and nobody is making it. */
static bool made(const shmq_broker *b, uint64_t name)
{
	return !(name & BEING_MADE) && !unused(b, name, 0);
}

/* A number that tells a topic's writer from all others; never 0. */
static uint64_t digest(uint64_t name, const uint64_t key[2])
{
	uint64_t h = name;

	for (int i = 0; i < 2; i++) {
		h = (h ^ key[i]) * UINT64_C(0x9e3779b97f4a7c15);
		h = (h ^ h >> 29) * UINT64_C(0xbf58476d1ce4e5b9);
		h ^= h >> 32;
	}
	return h | 1;
}

static void remember(shmq_writer_desc *w)
{
	uint64_t had = ld(&w->had);

	st(&w->gone[had % GONE], digest(ld(&w->topic), w->key)); /* SYNC(writer-name) */
	st(&w->had, had + 1);
	SHMQ_KILLPOINT("writer.remembered");
}

/* Returns true if the writer's entry gave way, as far as that is remembered. */
static bool gave_way(const shmq_broker *b, uint64_t mine, const uint64_t key[2])
{
	uint64_t wanted = digest(mine, key);

	for (uint32_t i = 0; i < SHMQ_WRITERS; i++)
		for (uint32_t j = 0; j < GONE; j++)
			if (ld(&b->writers[i].gone[j]) == wanted)
				return true;
	return false;
}

/* Claim a free entry and make it the key's; NULL if there is none. oldest: an entry of this topic
 * that gives way instead; NULL: none does. */
static shmq_writer_desc *entry_make(shmq_broker *b, uint64_t mine, const shmq_sequence *mark,
                                    shmq_writer_desc *oldest)
{
	shmq_writer_desc *w = oldest;

	if (w) {
		remember(w);
		st_release(&w->topic, mine | BEING_MADE); /* SYNC(writer-name) */
	}
	for (uint32_t i = 0; i < SHMQ_WRITERS && !w; i++) {
		uint64_t name = ld(&b->writers[i].topic);

		if (unused(b, name, mine) &&
		    atomic_compare_exchange_strong(&b->writers[i].topic, &name, mine | BEING_MADE))
			w = &b->writers[i];
	}
	if (!w)
		return NULL;
	SHMQ_KILLPOINT("writer.being_made");
	w->key[0] = mark->key[0];
	w->key[1] = mark->key[1];
	w->whose = mark->whose;
	w->epoch = w->rows = 0;
	st(&w->next_seq, 0);
	SHMQ_KILLPOINT("writer.filled");
	st_release(&w->topic, mine); /* SYNC(writer-name) */
	return w;
}

shmq_writer_desc *writer_find(shmq_broker *b, uint32_t topic, const uint64_t key[2])
{
	for (uint32_t i = 0; i < SHMQ_WRITERS; i++) {
		shmq_writer_desc *w = &b->writers[i];

		if (ld(&w->topic) == name_of(b, topic) && /* SYNC(writer-name) */
		    w->key[0] == key[0] && w->key[1] == key[1])
			return w;
	}
	return NULL;
}

/* Which entry gives way to a new one, and why. */
typedef struct choice {
	uint32_t n;               /* entries that count against the same limit */
	shmq_writer_desc *oldest; /* of them */
} choice;

static void count(choice *c, shmq_writer_desc *w)
{
	c->n++;
	if (!c->oldest || w->used < c->oldest->used)
		c->oldest = w;
}

/* The entries of the client on the network that has most of them. Another topic's may change
 * meanwhile: the choice is a hint until its P is held. */
static choice of_greediest(shmq_broker *b)
{
	choice most = {0, NULL}, its[SHMQ_WRITERS];
	uint64_t clients[SHMQ_WRITERS];
	uint16_t places[1 << PLACE_BITS] = {0}; /* client + 1, beginning where its hash says; 0: free */
	uint32_t n = 0;

	for (uint32_t i = 0; i < SHMQ_WRITERS; i++) {
		shmq_writer_desc *w = &b->writers[i];
		uint64_t whose = w->whose;
		uint32_t at = (uint32_t)(whose * UINT64_C(0x9e3779b97f4a7c15) >> (64 - PLACE_BITS));

		if (!whose || !made(b, ld(&w->topic)))
			continue;
		while (places[at] && clients[places[at] - 1] != whose)
			at = (at + 1) % (1 << PLACE_BITS);
		if (!places[at]) {
			clients[n] = whose;
			its[n] = (choice){0, NULL};
			places[at] = (uint16_t)++n;
		}
		count(&its[places[at] - 1], w);
	}
	for (uint32_t i = 0; i < n; i++)
		if (its[i].n > most.n || (its[i].n == most.n && its[i].oldest->used < most.oldest->used))
			most = its[i];
	return most;
}

/* The entry that gives way to a new one: of the same client if that has OF_ONE; if all are taken, of
 * the client on the network that has most, which may be the same. So who has few loses none to many
 * who have more. Where no client of the network has any, the oldest of this topic, or else of all:
 * no topic's writers keep those of another out, and who comes back after it gave way is told so.
 * NULL: a free one will do. *full: there is no free one. */
static shmq_writer_desc *gives_way(shmq_broker *b, uint64_t mine, const shmq_sequence *mark,
                                   bool *full)
{
	choice own = {0, NULL}, here = {0, NULL}, all = {0, NULL}, most;

	*full = true;
	for (uint32_t i = 0; i < SHMQ_WRITERS; i++) {
		shmq_writer_desc *w = &b->writers[i];
		uint64_t name = ld(&w->topic);

		if (unused(b, name, mine))
			*full = false;
		if (!made(b, name))
			continue;
		if (mark->whose && w->whose == mark->whose)
			count(&own, w);
		if (name == mine)
			count(&here, w);
		count(&all, w);
	}
	if (own.n >= OF_ONE)
		return own.oldest;
	if (!*full)
		return NULL;
	most = of_greediest(b);
	if (own.n && own.n >= most.n)
		return own.oldest;
	if (most.n)
		return most.oldest;
	return here.n ? here.oldest : all.oldest;
}

int writer_begin(shmq_broker *b, uint32_t topic, const shmq_sequence *mark, shmq_writer_desc **out,
                 uint32_t *other)
{
	uint64_t mine = name_of(b, topic), its;
	shmq_writer_desc *w = writer_find(b, topic, mark->key), *leaving;
	bool full;

	*other = SHMQ_NONE;
	if (!w && gave_way(b, mine, mark->key))
		return fail(SHMQ_INVALID,
		            "the mark of this writer was forgotten for those of others, so what "
		            "of it is published is not known: look at the topic, and go on as "
		            "another writer");
	if (!w) {
		leaving = gives_way(b, mine, mark, &full);
		its = leaving ? ld(&leaving->topic) : mine;
		if (its != mine) {
			*other = (uint32_t)(its & 0xffff) - 1;
			return SHMQ_AGAIN;
		}
		w = full && !leaving ? NULL : entry_make(b, mine, mark, leaving);
	}
	if (!w)
		return fail(SHMQ_TABLE_FULL,
		            "%d writers publish in epochs already; delete a topic of one that has ended",
		            SHMQ_WRITERS);
	w->used = (uint64_t)now_ns();
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

void writer_give_way(shmq_broker *b, uint32_t topic, uint32_t mine, const shmq_sequence *mark)
{
	bool full;
	shmq_writer_desc *w = gives_way(b, name_of(b, mine), mark, &full);

	if (w && ld(&w->topic) == name_of(b, topic)) {
		remember(w);
		st_release(&w->topic, 0); /* SYNC(writer-name) */
	}
	SHMQ_KILLPOINT("writer.gave_way");
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
