/* The counterexamples of docs/model: what is written to disk and read back. */
#include "counterexample.h"

static void nothing_overtakes_what_is_being_written_to_disk(void)
{
	stage *x = setup();

	publish(x, "abcde");
	begin_spill(x, 2, SHMQ_SPILL_READY);
	nothing_to_take(x); /* c would come before a */
	end_spill(x);
	nothing_to_take(x);
	restore_all(x);
	expect(x, "abcde");
	teardown(x);
}

static void a_rebuild_during_a_spill_leaves_its_slots_alone(void)
{
	stage *x = setup();
	uint32_t returned;

	publish(x, "abcde");
	begin_spill(x, 2, SHMQ_SPILL_READY);
	a_death(x, hold_the_deliver_lock);
	publish(x, "f");
	nothing_to_take(x); /* repairs; what is SPILLING is in no ring */
	SOUND(x->w);
	end_spill(x);
	EQUAL(world_reap(x->w, x->s, &returned), 1);
	SOUND(x->w);
	restore_all(x);
	expect(x, "abcdef");
	nothing_to_take(x);
	teardown(x);
}

static void emptied_slots_are_not_freed_again_by_the_spill(void)
{
	stage *x = setup();
	uint64_t dropped;

	publish(x, "abcde");
	begin_spill(x, 3, SHMQ_SPILL_READY);
	EQUAL(shmq_queue_empty(x->b, x->queue, x->serial, soon(), &dropped), 0);
	EQUAL(dropped, 5);
	publish(x, "fghijk"); /* in the very slots, perhaps */
	EQUAL(shmq_spill_end(x->s, &x->spill, x->spill.bytes, true, soon()), SHMQ_GONE);
	EQUAL(ld(&x->q->disk_write), 0);
	SOUND(x->w);
	expect(x, "fghijk");
	teardown(x);
}

static void the_write_position_alone_decides_what_is_on_disk(void)
{
	stage *x = setup();

	publish(x, "abcde");
	begin_spill(x, 4, SHMQ_SPILL_READY);
	for (uint32_t i = 0; i < 4; i++)
		x->map->slots[x->slots[i]].pos = x->positions[i];
	st(&x->q->disk_write, x->positions[2]); /* a and b are there, c and d are not; dead */
	EQUAL(shmq_adopt(x->s, x->queue, soon()), 0);
	x->at = x->positions[2];
	SOUND(x->w);
	nothing_to_take(x);
	restore_all(x);
	expect(x, "abcde");
	teardown(x);
}

static void sequence_numbers_are_not_given_twice_when_nothing_is_left(void)
{
	stage *x = setup();

	publish(x, "a");
	begin_spill(x, 1, SHMQ_SPILL_READY);
	end_spill(x);
	restore_all(x);
	rebuild(x);
	publish(x, "b");
	rebuild(x);
	EQUAL(shmq_adopt(x->s, x->queue, soon()), 0);
	EQUAL(ld(&x->b->topics[x->topic].committed), 2);
	expect(x, "ab");
	teardown(x);
}

static void spill_and_advance_and_die(stage *x)
{
	uint32_t moved;

	EQUAL(shmq_supervise(x->b, &x->w->limits, soon()), 0);
	x->s = x->b;
	EQUAL(shmq_stage_oldest(x->s, x->queue, 1, soon(), &moved), 0);
	begin_spill(x, 3, SHMQ_SPILL_READY);
}

static void a_successor_finds_what_the_dead_supervisor_had_in_hand(void)
{
	stage *x = setup();
	uint32_t returned;

	publish(x, "abcdef");
	a_death(x, spill_and_advance_and_die); /* no lock held: nothing is EOWNERDEAD */
	expect(x, "a");
	nothing_to_take(x);
	publish(x, "g");
	EQUAL(shmq_supervise(x->s, &x->w->limits, soon()), 0);
	EQUAL(shmq_adopt(x->s, x->queue, soon()), 0);
	EQUAL(world_reap(x->w, x->s, &returned), 1);
	EQUAL(ld(&x->q->spilling), 0);
	expect(x, "bcdefg");
	teardown(x);
}

static void restored_messages_come_before_ready_ones_whatever_their_numbers(void)
{
	stage *x = setup();
	shmq_message m;

	publish(x, "ab");
	begin_spill(x, 2, SHMQ_SPILL_READY);
	end_spill(x);
	publish(x, "cd");
	for (int i = 0; i < 50; i++) { /* the two counters far apart */
		restore_all(x);
		if (i % 2)
			rebuild(x);
		m = take(x);
		CHECK(body_is(&m, "a"));
		EQUAL(shmq_consumer_close(x->c, soon()), 0); /* goes back, with a new order */
		shmq_consumer_free(x->c);
		x->c = world_consumer(x->w, x->b, x->queue, x->serial, 1000);
		expect(x, "b");
		expect(x, "acd");
		nothing_to_take(x);
		publish(x, "ab");
		begin_spill(x, 2, SHMQ_SPILL_READY);
		end_spill(x);
		publish(x, "cd");
	}
	restore_all(x);
	expect(x, "abcd");
	teardown(x);
}

static void a_restore_of_what_was_emptied_meanwhile_is_refused(void)
{
	stage *x = setup();
	uint64_t dropped, used;
	uint32_t taken;

	publish(x, "abc");
	begin_spill(x, 3, SHMQ_SPILL_READY);
	end_spill(x);
	/* the supervisor has read the file into its memory; now */
	EQUAL(shmq_queue_empty(x->b, x->queue, x->serial, soon(), &dropped), 0);
	EQUAL(dropped, 3);
	EQUAL(shmq_restore(x->s, x->queue,
	                   &(shmq_records){.data = x->disk, .length = x->at, .next_position = x->at},
	                   soon(), &taken, &used),
	      SHMQ_GONE);
	EQUAL(taken, 0);
	SOUND(x->w);
	nothing_to_take(x);
	publish(x, "d");
	expect(x, "d");
	teardown(x);
}

static void prepare_halfway_in_the_restore(stage *x)
{
	uint32_t slot = free_slot(x->map, 0);

	EQUAL(both_lock(x->b, x->map, soon()), 0);
	x->map->slots[slot].pos = 0;
	x->map->slots[slot].order = 1;
	st_release(&x->map->slots[slot].word, word_next(ld(&x->map->slots[slot].word), SHMQ_RESTORED));
}

/* A slot that is RESTORED and not decided is FREE after a death. */
static void a_half_restored_slot_is_free_again(void)
{
	stage *x = setup();
	uint32_t returned;

	publish(x, "abc");
	begin_spill(x, 3, SHMQ_SPILL_READY);
	end_spill(x);
	a_death(x, prepare_halfway_in_the_restore);
	publish(x, "d");
	EQUAL(world_reap(x->w, x->s, &returned), 1);
	SOUND(x->w);
	restore_all(x);
	expect(x, "abcd");
	teardown(x);
}

/* A view keeps its bytes, even if its message goes to disk and comes back. */
static void a_pinned_message_that_is_spilled_keeps_its_bytes(void)
{
	stage *x = setup();
	shmq_message m;

	publish(x, "a");
	m = take(x);
	EQUAL(shmq_pin(x->c, &m, soon()), 0);
	begin_spill(x, 10, SHMQ_SPILL_ALL);
	EQUAL(x->spill.count, 1);
	end_spill(x);
	EQUAL(SHMQ_STATE_OF(ld(&x->map->slots[m.slot].word)), SHMQ_PINNED);
	SOUND(x->w);
	for (int i = 0; i < 150; i++)
		publish(x, "-");
	CHECK(body_is(&m, "a"));
	EQUAL(shmq_unpin(x->c, &m, soon()), 0);
	restore_all(x);
	expect(x, "a");
	teardown(x);
}

static void a_deferred_message_does_not_wait_behind_the_disk(void)
{
	stage *x = setup();
	shmq_body body = {"d", 1};
	int64_t due_at = shmq_realtime() + NS_PER_S;
	uint32_t expired, due;
	uint64_t id;

	publish(x, "abc");
	begin_spill(x, 3, SHMQ_SPILL_READY);
	end_spill(x);
	EQUAL(shmq_publish(x->p, &body, 1, due_at, soon(), &id), 0);
	EQUAL(shmq_expire(x->s, x->queue, &(shmq_expiry){.realtime = due_at, .limit = 10}, soon(),
	                  &expired, &due),
	      0);
	EQUAL(due, 1);
	expect(x, "d");
	nothing_to_take(x);
	restore_all(x);
	expect(x, "abc");
	teardown(x);
}

static void what_is_flushed_cannot_be_finished_any_more(void)
{
	stage *x = setup();
	shmq_message m;

	publish(x, "abc");
	m = take(x);
	begin_spill(x, 100, SHMQ_SPILL_ALL);
	EQUAL(x->spill.count, 3);
	EQUAL(shmq_finish(x->c, &m, 1, NULL, soon()), SHMQ_NOT_IN_FLIGHT); /* not true and then again */
	end_spill(x);
	EQUAL(shmq_finish(x->c, &m, 1, NULL, soon()), SHMQ_NOT_IN_FLIGHT);
	restore_all(x);
	expect(x, "abc");
	teardown(x);
}

/* A death before the write position is stored: everything comes back once, and what was in flight
 * comes first. */
static void a_flush_that_died_gives_everything_back_once(void)
{
	stage *x = setup();
	shmq_message m[2];

	publish(x, "abcd");
	m[0] = take(x);
	m[1] = take(x);
	EQUAL(shmq_requeue(x->c, m, 1, 0, NULL, soon()), 0);
	begin_spill(x, 100, SHMQ_SPILL_ALL);
	EQUAL(x->spill.count, 4);
	EQUAL(shmq_adopt(x->s, x->queue, soon()), 0);
	SOUND(x->w);
	EQUAL(shmq_finish(x->c, m + 1, 1, NULL, soon()), SHMQ_NOT_IN_FLIGHT);
	expect(x, "bcda");
	nothing_to_take(x);
	teardown(x);
}

static void without_a_supervisor_what_is_in_memory_goes_on(void)
{
	stage *x = setup();
	uint32_t moved;

	publish(x, "abcdef");
	EQUAL(shmq_stage_oldest(x->s, x->queue, 2, soon(), &moved), 0);
	begin_spill(x, 2, SHMQ_SPILL_READY);
	end_spill(x);
	/* nobody restores */
	expect(x, "ab");
	publish(x, "g");
	nothing_to_take(x); /* e waits for c, which is on disk */
	EQUAL(shmq_adopt(x->s, x->queue, soon()), 0);
	restore_all(x);
	expect(x, "cdefg");
	teardown(x);
}

int main(void)
{
	nothing_overtakes_what_is_being_written_to_disk();
	a_rebuild_during_a_spill_leaves_its_slots_alone();
	emptied_slots_are_not_freed_again_by_the_spill();
	the_write_position_alone_decides_what_is_on_disk();
	sequence_numbers_are_not_given_twice_when_nothing_is_left();
	a_successor_finds_what_the_dead_supervisor_had_in_hand();
	restored_messages_come_before_ready_ones_whatever_their_numbers();
	a_restore_of_what_was_emptied_meanwhile_is_refused();
	a_half_restored_slot_is_free_again();
	a_pinned_message_that_is_spilled_keeps_its_bytes();
	a_deferred_message_does_not_wait_behind_the_disk();
	what_is_flushed_cannot_be_finished_any_more();
	a_flush_that_died_gives_everything_back_once();
	without_a_supervisor_what_is_in_memory_goes_on();
	return 0;
}
