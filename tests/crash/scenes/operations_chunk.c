/* Chunks of deferred messages. */
#include "operations.h"

static void chunk_begin(scene *s, shmq_broker *b)
{
	EQUAL(CALL(s, b,
	           shmq_chunk_begin(
					   b, first_queue(s),
					   &(shmq_chunk_wish){
						   .chunk = 1, .from_due = INT64_MIN, .max_bytes = 1 << 10, .n = 3},
					   soon(), &s->spill)),
	      0);
	EQUAL(s->spill.count, 3);
	CHECK(s->spill.bytes <= sizeof(s->ledger->chunk));
	EQUAL(WATCHED(shmq_spill_encode(b, &s->spill, s->ledger->chunk)), 0);
	for (uint32_t i = 0; i < s->spill.count; i++) {
		s->ledger->chunk_lengths[i] = s->spill.lengths[i];
		s->ledger->chunk_dues[i] = (int64_t)s->spill.positions[i];
	}
	s->ledger->chunk_count = s->spill.count;
}

static void write_chunk(scene *s)
{
	chunk_begin(s, s->mine);
	EQUAL(WATCHED(shmq_spill_end(s->mine, &s->spill, 0, true, soon())), 0);
}

static void write_chunk_in_vain(scene *s)
{
	chunk_begin(s, s->mine);
	EQUAL(WATCHED(shmq_spill_end(s->mine, &s->spill, 0, false, soon())), 0);
}

static void come_and_write_chunk(scene *s)
{
	come_to_supervise(s);
	write_chunk(s);
}

static void read_chunk(scene *s)
{
	CHECK(load_chunk(s, s->mine, 2));
	CHECK(load_chunk(s, s->mine, 2));
	CHECK(!load_chunk(s, s->mine, 2));
}

void everything_and_a_chunk(scene *s)
{
	four_are_deferred(s);
	chunk_begin(s, s->home);
	EQUAL(shmq_spill_end(s->home, &s->spill, 0, true, soon()), 0);
	CHECK(load_chunk(s, s->home, 1));
}

void half_a_chunk(scene *s)
{
	four_are_deferred(s);
	chunk_begin(s, s->home);
}

/* The supervisor ends its chunk: messages that `empty` took are gone, the others are written. */
void the_chunk_ends(scene *s)
{
	int r = CALL(s, s->home, shmq_spill_end(s->home, &s->spill, 0, true, soon()));

	CHECK(r == 0 || r == SHMQ_GONE);
	if (r)
		s->ledger->chunk_count = 0;
}

static void recount_chunks(scene *s)
{
	EQUAL(WATCHED(shmq_chunk_depth(s->mine, first_queue(s), 3, soon())), 0);
}

static void four_with_properties(scene *s)
{
	with_properties(s);
	four_are_deferred(s);
}

static const operation table[] = {
	{"write a chunk", 1, four_are_deferred, come_to_supervise, write_chunk, NULL, 1, 1, 0},
	{"write a chunk in vain", 1, four_are_deferred, come_to_supervise, write_chunk_in_vain, NULL, 1,
	 1, 0},
	{"read a chunk", 1, four_are_deferred, come_and_write_chunk, read_chunk, NULL, 1, 1, 0},
	{"write a chunk of properties", 1, four_with_properties, come_to_supervise, write_chunk, NULL,
	 1, 1, 0},
	{"read a chunk of properties", 1, four_with_properties, come_and_write_chunk, read_chunk, NULL,
	 1, 1, 0},
	{"recount chunks", 1, four_are_deferred, come_and_write_chunk, recount_chunks, NULL, 1, 1, 0},
};

const operations chunk_operations = {table, sizeof(table) / sizeof(table[0])};
