/* Plays: overflow to disk and back, writing before the read position, chunks, expiry. */
#include "stage.h"

static void spill_begin(enum shmq_spill_source from, uint32_t n)
{
	k->spill.slots = k->slots;
	k->spill.lengths = k->lengths;
	k->spill.positions = k->positions;
	if (shmq_spill_begin(k->actors[3].b, k->queue[0], from, n, 1 << 14, soon(), &k->spill)) {
		k->spill.count = 0;
		return;
	}
}

static void spill_end(void)
{
	uint64_t at = desc(0)->disk_write;
	int r;

	if (!k->spill.count)
		return;
	EQUAL(shmq_spill_encode(k->actors[3].b, &k->spill, k->disk + at), 0);
	for (uint32_t i = 0; i < k->spill.count; at += k->lengths[i++])
		k->positions[i] = at;
	r = shmq_spill_end(k->actors[3].b, &k->spill, at, true, soon());
	CHECK(!r || r == SHMQ_GONE);
}

void spill_3(void)
{
	spill_begin(SHMQ_SPILL_READY, 2);
	spill_end();
}

static void spill_in_vain_3(void)
{
	spill_begin(SHMQ_SPILL_READY, 2);
	if (k->spill.count)
		EQUAL(shmq_spill_end(k->actors[3].b, &k->spill, 0, false, soon()), 0);
}

static void spill_returned_3(void)
{
	spill_begin(SHMQ_SPILL_REQUEUED, 2);
	spill_end();
}

static void spill_out_3(void)
{
	spill_begin(SHMQ_SPILL_DELIVERED, 2);
	spill_end();
}

void flush_3(void)
{
	uint32_t count;

	EQUAL(shmq_evict_read_ahead(k->actors[3].b, k->queue[0], soon(), &count), 0);
	spill_begin(SHMQ_SPILL_ALL, 8);
	spill_end();
}

void restore_3(void)
{
	uint64_t from = desc(0)->disk_read, to = desc(0)->disk_write, used;
	uint32_t taken;
	int r;

	do
		r = shmq_restore(k->actors[3].b, k->queue[0],
		                 &(shmq_records){.data = k->disk + from,
		                                 .length = to - from,
		                                 .position = from,
		                                 .next_position = to},
		                 soon(), &taken, &used);
	while (r == SHMQ_AGAIN);
	CHECK(!r || r == SHMQ_GONE);
}

static void stage_3(void)
{
	uint32_t moved;

	EQUAL(shmq_stage_oldest(k->actors[3].b, k->queue[0], 1, soon(), &moved), 0);
}

static void stage_and_spill_3(void)
{
	stage_3();
	spill_3();
}

static void spill_and_restore_3(void)
{
	spill_3();
	restore_3();
}

static void prepend_from(enum shmq_spill_source from, bool ok)
{
	int r;

	spill_begin(from, 8);
	if (!k->spill.count)
		return;
	EQUAL(shmq_spill_encode(k->actors[3].b, &k->spill, k->disk + k->spill.position), 0);
	r = shmq_spill_end(k->actors[3].b, &k->spill, 0, ok, soon());
	CHECK(!r || r == SHMQ_GONE);
}

void prepend_flush_3(void)
{
	prepend_from(SHMQ_SPILL_PREPEND_FLUSH, true);
}

void prepend_3(void)
{
	prepend_from(SHMQ_SPILL_PREPEND, true);
}

static void prepend_in_vain_3(void)
{
	prepend_from(SHMQ_SPILL_PREPEND, false);
}

void expire_3(void)
{
	uint32_t expired, due;

	EQUAL(shmq_expire(k->actors[3].b, k->queue[0],
	                  &(shmq_expiry){
						  .now = shmq_now() + 1000 * NS_PER_S, .realtime = INT64_MAX, .limit = 8},
	                  soon(), &expired, &due),
	      0);
}

static void write_chunk_3(void)
{
	int r;

	k->spill.slots = k->slots;
	k->spill.lengths = k->lengths;
	k->spill.positions = k->positions;
	if (shmq_chunk_begin(
				k->actors[3].b, k->queue[0],
				&(shmq_chunk_wish){.chunk = 1, .from_due = INT64_MIN, .max_bytes = 1 << 10, .n = 2},
				soon(), &k->spill))
		return;
	EQUAL(shmq_spill_encode(k->actors[3].b, &k->spill, k->chunk), 0);
	for (uint32_t i = 0; i < k->spill.count; i++) {
		k->chunk_lengths[i] = k->lengths[i];
		k->chunk_dues[i] = (int64_t)k->positions[i];
	}
	k->chunk_count = k->spill.count;
	r = shmq_spill_end(k->actors[3].b, &k->spill, 0, true, soon());
	CHECK(!r || r == SHMQ_GONE);
}

static void chunk_there_and_back_3(void)
{
	write_chunk_3();
	(void)load_chunk(k->actors[3].b);
}

static void begin_spilled(void)
{
	begin_with_supervisor();
	schedule_as(3);
	spill_3();
	schedule_as(OUTSIDE);
}

static void begin_spill_half(void)
{
	begin_with_supervisor();
	schedule_as(3);
	spill_begin(SHMQ_SPILL_READY, 3);
	schedule_as(OUTSIDE);
}

/* Two messages read from disk are in memory; `all`: no others are on disk, else two more. */
static void begin_read(bool all)
{
	uint64_t half, used;
	uint32_t taken;

	begin_with_supervisor();
	schedule_as(3);
	spill_3();
	half = desc(0)->disk_write;
	if (!all)
		spill_3();
	EQUAL(shmq_restore(k->actors[3].b, k->queue[0],
	                   &(shmq_records){.data = k->disk, .length = half, .next_position = half},
	                   soon(), &taken, &used),
	      0);
	EQUAL(taken, 2);
	schedule_as(OUTSIDE);
}

static void begin_read_all(void)
{
	begin_read(true);
}

static void begin_read_half(void)
{
	begin_read(false);
}

static void begin_read_half_and_taken(void)
{
	begin_read(false);
	schedule_as(1);
	take(1, 0, 1);
	schedule_as(OUTSIDE);
	k->out_of_order = true;
}

static void begin_came_back(void)
{
	begin_taken();
	schedule_as(1);
	requeue_1();
	schedule_as(OUTSIDE);
}

static void begin_given_back(void)
{
	begin_one_died();
	schedule_as(3);
	reap_3();
	schedule_as(OUTSIDE);
}

static void begin_deferred(void)
{
	begin(1);
	publish(EARLY, 2, in_an_hour());
	come_to_publish(0);
	come_to_take(1, 0);
	come(2, SHMQ_AS_CLIENT);
	come_to_supervise(3);
	k->out_of_order = true;
}

void begin_read_half_to_lease(void)
{
	begin_read(false);
	come_to_lease();
}

static const play table[] = {
	/* the actors: 0 publishes, 1 takes, 2 one or the other, 3 supervises */
	PLAY("publish, take, spill", begin_with_supervisor, publish_one_0, take_one_1, NULL, spill_3),
	PLAY("publish, take, spill in vain", begin_with_supervisor, publish_one_0, take_one_1, NULL,
	     spill_in_vain_3),
	PLAY("publish, take, stage and spill", begin_with_supervisor, publish_one_0, take_two_1, NULL,
	     stage_and_spill_3),
	PLAY("take, empty, spill", begin_with_supervisor, NULL, take_one_1, empty_2, spill_3),
	PLAY("empty, the spill ends", begin_spill_half, NULL, NULL, empty_2, spill_end),
	PLAY("take, rebuild beside a spill", begin_spill_half, NULL, take_one_1, NULL, spill_end),
	PLAY("publish, take, restore", begin_spilled, publish_one_0, take_two_1, NULL, restore_3),
	PLAY("take, empty, restore", begin_spilled, NULL, take_one_1, empty_2, restore_3),
	PLAY("publish, take, spill and restore", begin_with_supervisor, publish_one_0, take_one_1, NULL,
	     spill_and_restore_3),
	PLAY("finish, flush", begin_taken, NULL, finish_1, NULL, flush_3),
	PLAY("finish, empty, flush", begin_taken, NULL, finish_1, empty_2, flush_3),
	PLAY("finish, prepend for a flush", begin_read_half_and_taken, NULL, finish_1, NULL,
	     prepend_flush_3),
	PLAY("publish, take, prepend", begin_read_half, publish_one_0, take_one_1, NULL, prepend_3),
	PLAY("publish, take, prepend to nothing", begin_read_all, publish_one_0, take_one_1, NULL,
	     prepend_3),
	PLAY("publish, take, prepend in vain", begin_read_all, publish_one_0, take_one_1, NULL,
	     prepend_in_vain_3),
	PLAY("publish, wait, prepend", begin_read_all, publish_one_0, wait_1, NULL, prepend_3),
	PLAY("take, empty, prepend", begin_read_half, NULL, take_one_1, empty_2, prepend_3),
	PLAY("finish, rebuild beside a prepend", begin_read_half_and_taken, NULL, finish_1, rebuild_2,
	     prepend_3),
	PLAY("publish, take, spill what came back", begin_came_back, publish_one_0, take_one_1, NULL,
	     spill_returned_3),
	PLAY("publish, take, spill what was out", begin_given_back, publish_one_0, take_one_1, NULL,
	     spill_out_3),
	PLAY("finish, expire", begin_taken, NULL, finish_1, NULL, expire_3),
	PLAY("touch, expire", begin_taken, NULL, touch_1, NULL, expire_3),
	PLAY("close, expire", begin_taken, NULL, close_1, NULL, expire_3),
	PLAY("publish deferred, take, expire", begin_deferred, publish_deferred_0, take_one_1, NULL,
	     expire_3),
	PLAY("publish deferred, write a chunk", begin_deferred, publish_deferred_0, NULL, NULL,
	     write_chunk_3),
	PLAY("take, a chunk there and back", begin_deferred, NULL, take_one_1, NULL,
	     chunk_there_and_back_3),
	PLAY("empty, a chunk there and back", begin_deferred, NULL, NULL, empty_2,
	     chunk_there_and_back_3),
	PLAY("publish, take, adopt", begin_spill_half, publish_one_0, take_one_1, NULL, adopt_3),
};

const plays spill_plays = {table, sizeof(table) / sizeof(table[0])};
