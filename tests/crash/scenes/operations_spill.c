/* Overflow: spill, restore, flush, prepend. */
#include "operations.h"

#include <string.h>

void stage_oldest(scene *s, shmq_broker *b, uint32_t n)
{
	uint32_t moved;

	EQUAL(CALL(s, b, shmq_stage_oldest(b, first_queue(s), n, soon(), &moved)), 0);
	EQUAL(moved, n);
}

void stage_four(scene *s)
{
	stage_oldest(s, s->mine, 4);
}

void spill_begin(scene *s, shmq_broker *b, enum shmq_spill_source from, uint32_t n)
{
	uint64_t at = s->ledger->written;

	EQUAL(CALL(s, b, shmq_spill_begin(b, first_queue(s), from, n, 1 << 16, soon(), &s->spill)), 0);
	CHECK(at + s->spill.bytes <= sizeof(s->ledger->disk));
	EQUAL(WATCHED(shmq_spill_encode(b, &s->spill, s->ledger->disk + at)), 0);
	for (uint32_t i = 0; i < s->spill.count; at += s->spill.lengths[i++])
		s->spill.positions[i] = at;
}

void spill_end(scene *s, shmq_broker *b)
{
	EQUAL(WATCHED(shmq_spill_end(b, &s->spill, s->ledger->written + s->spill.bytes, true, soon())),
	      0);
	s->ledger->written += s->spill.bytes;
}

static void spill_six(scene *s)
{
	spill_begin(s, s->mine, SHMQ_SPILL_READY, 6);
	spill_end(s, s->mine);
}

static void spill_in_vain(scene *s)
{
	spill_begin(s, s->mine, SHMQ_SPILL_READY, 6);
	EQUAL(WATCHED(shmq_spill_end(s->mine, &s->spill, 0, false, soon())), 0);
}

void a_bit_of_everything(scene *s)
{
	eight_more(s);
	some_are_deferred(s);
	take_alive(s, 4);
	EQUAL(shmq_requeue(s->consumer, s->m, 1, 0, NULL, soon()), 0);
	EQUAL(shmq_requeue(s->consumer, s->m + 1, 1, 60 * SECOND, NULL, soon()), 0);
	stage_oldest(s, s->home, 2);
	some_are_deferred(s);
}

static void spill_what_came_back(scene *s)
{
	spill_begin(s, s->mine, SHMQ_SPILL_REQUEUED, 2);
	EQUAL(s->spill.count, 2);
	spill_end(s, s->mine);
}

/* A consumer took two and left; they are the first to be taken again. */
static void come_and_give_back(scene *s)
{
	come_to_supervise(s);
	s->my_consumer = consume(s, s->mine, 0);
	take(s, 2);
	EQUAL(shmq_consumer_close(s->my_consumer, soon()), 0);
	EQUAL(shmq_spill_begin(s->mine, first_queue(s), SHMQ_SPILL_REQUEUED, 2, 1 << 16, soon(),
	                       &s->spill),
	      SHMQ_EMPTY);
}

static void spill_what_was_out(scene *s)
{
	spill_begin(s, s->mine, SHMQ_SPILL_DELIVERED, 2);
	EQUAL(s->spill.count, 2);
	spill_end(s, s->mine);
}

static void flush(scene *s)
{
	spill_begin(s, s->mine, SHMQ_SPILL_ALL, 64);
	spill_end(s, s->mine);
}

void come_and_spill(scene *s)
{
	come_to_supervise(s);
	stage_four(s);
	spill_six(s);
}

static void restore_first(scene *s)
{
	restore(s, s->mine, 0);
}

static void come_spill_and_restore(scene *s)
{
	come_and_spill(s);
	restore_first(s);
}

/* The read position jumps over the records on disk, as over damage that is set aside. */
static void jump(scene *s)
{
	uint64_t depth = queue_of(s, 0)->disk_depth;

	for (uint32_t i = 4; i < 10; i++)
		s->ledger->fate[0][i] = EITHER;
	EQUAL(depth, 6);
	EQUAL(WATCHED(shmq_disk_set(s->mine, first_queue(s), 0, s->ledger->written, 0, soon())), 0);
	for (uint32_t i = 4; i < 10; i++)
		s->ledger->fate[0][i] = DONE;
}

/* Adopt positions as another broker left them: nothing is on disk any more. Messages that were read
 * from it stay. */
static void take_up_files(scene *s)
{
	uint64_t end = s->ledger->written;

	watch_begin();
	EQUAL(shmq_disk_adopt(s->mine, first_queue(s), end, end, 0, 0, soon()), 0);
	shmq_names_written(s->mine, 1, 2);
	shmq_disk_trouble_set(s->mine, 28);
	watch_end();
}

static void evict_six(scene *s)
{
	uint32_t count;

	EQUAL(WATCHED(shmq_evict_read_ahead(s->mine, first_queue(s), soon(), &count)), 0);
	EQUAL(count, 6);
}

/* Some of the messages that were read from disk are in flight, the others wait; more are on disk. */
static void come_and_read_some(scene *s)
{
	uint64_t half, used;
	uint32_t taken;

	come_to_supervise(s);
	stage_four(s);
	spill_begin(s, s->mine, SHMQ_SPILL_READY, 4);
	spill_end(s, s->mine);
	half = s->ledger->written;
	spill_begin(s, s->mine, SHMQ_SPILL_READY, 4);
	spill_end(s, s->mine);
	EQUAL(shmq_restore(
				  s->mine, first_queue(s),
				  &(shmq_records){.data = s->ledger->disk, .length = half, .next_position = half},
				  soon(), &taken, &used),
	      0);
	EQUAL(taken, 4);
	s->my_consumer = consume(s, s->mine, 0);
	take(s, 5);
	finish(s, 0, s->my_consumer, s->m, 4);
}

/* All messages on disk have been read and wait; newer ones are READY. */
static void come_and_read(scene *s, uint32_t n)
{
	uint64_t used;
	uint32_t taken;

	come_to_supervise(s);
	spill_begin(s, s->mine, SHMQ_SPILL_READY, n);
	spill_end(s, s->mine);
	EQUAL(shmq_restore(s->mine, first_queue(s),
	                   &(shmq_records){.data = s->ledger->disk,
	                                   .length = s->ledger->written,
	                                   .next_position = s->ledger->written},
	                   soon(), &taken, &used),
	      0);
	EQUAL(taken, n);
}

static void come_and_read_all(scene *s)
{
	come_and_read(s, 4);
}

/* The first four have no properties, the others have. */
static void come_and_read_eight(scene *s)
{
	come_and_read(s, 8);
}

static void prepend_from(scene *s, enum shmq_spill_source from, uint32_t count, bool ok)
{
	EQUAL(WATCHED(shmq_spill_begin(s->mine, first_queue(s), from, 64, 0, soon(), &s->spill)), 0);
	EQUAL(s->spill.count, count);
	EQUAL(WATCHED(shmq_spill_encode(s->mine, &s->spill, s->ledger->disk + s->spill.position)), 0);
	EQUAL(WATCHED(shmq_spill_end(s->mine, &s->spill, 0, ok, soon())), 0);
}

static void prepend_flush(scene *s)
{
	prepend_from(s, SHMQ_SPILL_PREPEND_FLUSH, 4, true);
	EQUAL(s->spill.position, 0);
}

static void prepend_flush_in_vain(scene *s)
{
	prepend_from(s, SHMQ_SPILL_PREPEND_FLUSH, 4, false);
}

/* One is in flight and stays. */
static void prepend(scene *s)
{
	prepend_from(s, SHMQ_SPILL_PREPEND, 3, true);
	EQUAL(s->spill.position, s->spill.bytes / 3);
}

static void prepend_all(scene *s)
{
	prepend_from(s, SHMQ_SPILL_PREPEND, 4, true);
	EQUAL(s->spill.position, 0);
}

static void prepend_eight(scene *s)
{
	prepend_from(s, SHMQ_SPILL_PREPEND, 8, true);
	EQUAL(s->spill.position, 0);
}

static void prepend_in_vain(scene *s)
{
	prepend_from(s, SHMQ_SPILL_PREPEND, 4, false);
}

static void eight_with_properties(scene *s)
{
	with_properties(s);
	eight_more(s);
}

static void everything_with_properties(scene *s)
{
	with_properties(s);
	a_bit_of_everything(s);
}

/* Four that are not sealed, and eight that are. */
static void eight_sealed(scene *s)
{
	with_seals(s);
	eight_more(s);
}

/* Somebody writes into the data path: the tag of one record is wrong, and that of another belongs to
 * the message before it. */
static void come_spill_and_forge(scene *s)
{
	come_and_spill(s);
	for (uint32_t i = 0; i < 2; i++) {
		uint64_t at = s->spill.positions[2 + 2 * i], before = s->spill.positions[1 + 2 * i];
		uint8_t *tag = s->ledger->disk + at + s->spill.lengths[2 + 2 * i] - SMALL - 16;

		if (i)
			memcpy(tag, s->ledger->disk + before + s->spill.lengths[1 + 2 * i] - SMALL - 16, 16);
		else
			tag[15] ^= 1;
		s->ledger->sealed[6 + 2 * i] = FORGED;
	}
}

static const operation table[] = {
	{"stage the oldest", 1, eight_more, come_to_supervise, stage_four, NULL, 1, 0, 0},
	{"stage the oldest after much came and went", 1, much_came_and_went, come_to_supervise,
	 stage_four, NULL, 1, 0, 0},
	{"spill", 1, eight_more, come_to_supervise, spill_six, NULL, 1, 0, 0},
	{"spill again", 1, eight_more, come_and_spill, spill_six, NULL, 1, 0, 0},
	{"spill what came back", 1, some_came_back, come_to_supervise, spill_what_came_back, NULL, 1, 1,
	 0},
	{"spill what was out", 1, eight_more, come_and_give_back, spill_what_was_out, NULL, 1, 1, 0},
	{"spill in vain", 1, eight_more, come_to_supervise, spill_in_vain, NULL, 1, 0, 0},
	{"restore", 1, eight_more, come_and_spill, restore_first, NULL, 1, 0, 0},
	{"spill properties", 1, eight_with_properties, come_to_supervise, spill_six, NULL, 1, 0, 0},
	{"restore properties", 1, eight_with_properties, come_and_spill, restore_first, NULL, 1, 0, 0},
	{"flush properties", 1, everything_with_properties, come_to_supervise, flush, NULL, 1, 1, 0},
	{"write properties in front", 1, eight_with_properties, come_and_read_eight, prepend_eight,
	 NULL, 1, 0, 0},
	{"spill sealed ones", 1, eight_sealed, come_to_supervise, spill_six, NULL, 1, 0, 0},
	{"restore sealed ones", 1, eight_sealed, come_and_spill, restore_first, NULL, 1, 0, 0},
	{"restore forged seals", 1, eight_sealed, come_spill_and_forge, restore_first, NULL, 1, 0, 0},
	{"write sealed ones in front", 1, eight_sealed, come_and_read_eight, prepend_eight, NULL, 1, 0,
	 0},
	{"jump over damage", 1, eight_more, come_and_spill, jump, NULL, 1, 0, 0},
	{"take up another's files", 1, eight_more, come_spill_and_restore, take_up_files, NULL, 1, 0,
	 0},
	{"flush", 1, a_bit_of_everything, come_to_supervise, flush, NULL, 1, 1, 0},
	{"flush: evict what was read ahead", 1, eight_more, come_spill_and_restore, evict_six, NULL, 1,
	 0, 0},
	{"flush: prepend", 1, eight_more, come_and_read_some, prepend_flush, NULL, 1, 1, 0},
	{"flush: prepend in vain", 1, eight_more, come_and_read_some, prepend_flush_in_vain, NULL, 1, 1,
	 0},
	{"prepend", 1, eight_more, come_and_read_some, prepend, NULL, 1, 1, 0},
	{"prepend to nothing", 1, eight_more, come_and_read_all, prepend_all, NULL, 1, 0, 0},
	{"prepend in vain", 1, eight_more, come_and_read_all, prepend_in_vain, NULL, 1, 0, 0},
	{"flush leases", 1, lease_alive, come_to_supervise, flush, leases_are_whole, 1, 0, 0},
};

const operations spill_operations = {table, sizeof(table) / sizeof(table[0])};
