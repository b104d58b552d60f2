/*
 * The interleavings the models found (model/README.md), each staged: by calls in the fatal order, by
 * half-done states written into the shared bytes, by processes that stop or die with locks held.
 *
 * Elsewhere: 5 and 16 (budgets, bytes behind free slots) test_budget.c; 14 (wake-ups)
 * test_doorbell.c; 1d, 10 and 11 also at every instruction that matters in test_kill.c.
 * Not staged: 9 [R] ENOTRECOVERABLE by EMFILE, the core opens no descriptor (SHMQ_NEED_MAP stands
 * for it here). 13 [R] the attach semaphore's drift, it is Python's. 20 leases, the core has none
 * yet. 21 the reserve in the metadata, it is Python's; the floor it gives is tested.
 */
#include "harness.h"

#include <signal.h>

typedef struct stage {
	world *w;
	shmq_broker *b, *s;
	uint32_t topic, generation, queue;
	uint64_t serial;
	shmq_producer *p;
	shmq_consumer *c;
	shmq_map *map;
	shmq_queue_desc *q;
	uint32_t slots[300], lengths[300];
	uint64_t positions[300], at;
	shmq_spill spill;
	uint8_t disk[1 << 16];
} stage;

static stage *setup(void)
{
	stage *x = calloc(1, sizeof(*x));

	x->w = world_start(small_limits(300, 100));
	x->s = x->w->supervisor;
	x->topic = world_topic(x->w, "t", &x->generation);
	x->queue = world_queue(x->w, x->topic, "c", &x->serial);
	x->b = world_attach(x->w, SHMQ_AS_CLIENT);
	EQUAL(shmq_producer_open(x->b, x->topic, x->generation, &x->p), 0);
	x->c = world_consumer(x->w, x->b, x->queue, x->serial, 1000);
	x->map = world_view(x->w, x->queue);
	x->q = x->map->q;
	x->spill = (shmq_spill){.slots = x->slots, .lengths = x->lengths, .positions = x->positions};
	return x;
}

static void teardown(stage *x)
{
	SOUND(x->w);
	EQUAL(shmq_consumer_close(x->c, soon()), 0);
	shmq_consumer_free(x->c);
	shmq_producer_close(x->p);
	EQUAL(MAPPED(x->w, x->b, shmq_broker_detach(x->b, soon())), 0);
	shmq_broker_close(x->b);
	world_stop(x->w);
	free(x);
}

static void publish(stage *x, const char *letters)
{
	char text[2] = {0};

	for (; *letters; letters++) {
		text[0] = *letters;
		EQUAL(world_publish(x->w, x->b, x->p, text), 0);
	}
}

static shmq_message take(stage *x)
{
	shmq_message m;
	uint32_t got;

	EQUAL(shmq_take(x->c, &m, 1, soon(), &got), 0);
	return m;
}

static void nothing_to_take(stage *x)
{
	shmq_message m;
	uint32_t got;

	EQUAL(shmq_take(x->c, &m, 1, soon(), &got), SHMQ_EMPTY);
}

static void expect(stage *x, const char *letters)
{
	char text[2] = {0};

	for (; *letters; letters++) {
		shmq_message m = take(x);

		text[0] = *letters;
		if (!body_is(&m, text))
			fprintf(stderr, "%.1s, not %s\n", (const char *)m.body, text);
		CHECK(body_is(&m, text));
		EQUAL(shmq_finish(x->c, &m, 1, NULL, soon()), 0);
	}
}

static void begin_spill(stage *x, uint32_t n, enum shmq_spill_from from)
{
	uint64_t at = x->at;

	EQUAL(shmq_spill_begin(x->s, x->queue, from, n, 1 << 14, soon(), &x->spill), 0);
	EQUAL(shmq_spill_encode(x->s, &x->spill, x->disk + at), 0);
	for (uint32_t i = 0; i < x->spill.count; at += x->lengths[i++])
		x->positions[i] = at;
}

static void end_spill(stage *x)
{
	EQUAL(shmq_spill_end(x->s, &x->spill, x->at + x->spill.bytes, true, soon()), 0);
	x->at += x->spill.bytes;
}

static void restore_all(stage *x)
{
	uint64_t from = ld(&x->q->disk_read), used;
	uint32_t taken;

	EQUAL(shmq_restore(x->s, x->queue, x->disk + from, x->at - from, from, x->at, soon(), &taken, &used),
	      0);
	EQUAL(used, x->at - from);
}

static void rebuild(stage *x)
{
	EQUAL(shmq_rebuild(x->s, x->queue, soon()), 0);
}

/* A child that does `what` with handles of its own and is then killed. */
static void a_death(stage *x, void (*what)(stage *))
{
	pid_t pid = fork();
	int status;

	if (!pid) {
		x->b = world_attach(x->w, SHMQ_AS_CLIENT);
		x->c = world_consumer(x->w, x->b, x->queue, x->serial, 1000);
		x->map = ld(&x->b->maps[x->queue]);
		EQUAL(shmq_producer_open(x->b, x->topic, x->generation, &x->p), 0);
		what(x);
		raise(SIGKILL);
	}
	EQUAL(waitpid(pid, &status, 0), pid);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* 1 a */
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

static void hold_the_deliver_lock(stage *x)
{
	EQUAL(lock_take(&x->map->q->deliver, 0), 0);
}

/* 1 b */
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

/* 1 c */
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

/* 1 d */
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

/* 1 e */
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

/* 1 f and 7: a loan has its place when it is committed, and survives rebuild and spill until then */
static void a_loan_has_its_number_from_its_commit(void)
{
	stage *x = setup();
	shmq_loan *loan;
	uint64_t id;

	publish(x, "a");
	EQUAL(shmq_loan_begin(x->p, 1, soon(), &loan), 0);
	*(char *)shmq_loan_data(loan) = 'z';
	publish(x, "bc");
	begin_spill(x, 3, SHMQ_SPILL_READY);
	end_spill(x);
	rebuild(x);
	EQUAL(shmq_adopt(x->s, x->queue, soon()), 0);
	SOUND(x->w);
	for (int i = 0; i < 200; i++) { /* nobody else gets its slot or its bytes */
		EQUAL(*(char *)shmq_loan_data(loan), 'z');
		publish(x, "-");
	}
	EQUAL(shmq_loan_commit(loan, 0, soon(), &id), 0);
	shmq_loan_free(loan);
	restore_all(x);
	expect(x, "abc");
	for (int i = 0; i < 200; i++)
		expect(x, "-");
	expect(x, "z");
	teardown(x);
}

static void spill_and_advance_and_die(stage *x)
{
	uint32_t moved;

	EQUAL(shmq_supervise(x->b, &x->w->limits, soon()), 0);
	x->s = x->b;
	EQUAL(shmq_advance(x->s, x->queue, 1, soon(), &moved), 0);
	begin_spill(x, 3, SHMQ_SPILL_READY);
}

/* 2 */
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

/* 3 */
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

/* 4 */
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
	EQUAL(shmq_restore(x->s, x->queue, x->disk, x->at, 0, x->at, soon(), &taken, &used), SHMQ_GONE);
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

/* 4: RESTORED and not decided is nobody's after a death */
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

static pid_t stopped(stage *x, bool publish_lock)
{
	pid_t pid = fork();
	int status;

	if (!pid) {
		shmq_broker *b = world_attach(x->w, SHMQ_AS_CLIENT);
		shmq_lock_desc *lock;

		EQUAL(shmq_broker_map(b, x->queue, x->serial, x->w->queues[x->serial]), 0);
		lock = publish_lock ? &b->topics[x->topic].publish : &ld(&b->maps[x->queue])->q->deliver;
		EQUAL(lock_take(lock, 0), 0);
		raise(SIGSTOP);
		lock_drop(lock);
		EQUAL(shmq_broker_detach(b, soon()), 0);
		_exit(0);
	}
	EQUAL(waitpid(pid, &status, WUNTRACED), pid);
	CHECK(WIFSTOPPED(status));
	return pid;
}

static void go_on(pid_t pid)
{
	int status;

	EQUAL(kill(pid, SIGCONT), 0);
	EQUAL(waitpid(pid, &status, 0), pid);
	CHECK(WIFEXITED(status) && !WEXITSTATUS(status));
}

/* 6 */
static void only_a_holder_of_the_deliver_lock_pushes_free_slots(void)
{
	stage *x = setup();
	shmq_loan *loan;
	pid_t pid;

	EQUAL(shmq_loan_begin(x->p, 1, soon(), &loan), 0);
	pid = stopped(x, false);
	EQUAL(shmq_loan_cancel(loan, 0), SHMQ_AGAIN);
	go_on(pid);
	pid = stopped(x, true);
	EQUAL(shmq_loan_cancel(loan, 0), 0);
	go_on(pid);
	shmq_loan_free(loan);
	EQUAL(ring_count(&x->q->free_head, &x->q->free_tail), ld(&x->q->slots_committed));
	teardown(x);
}

/* 6: a refusal takes nothing */
static void a_refused_publish_takes_no_slot_anywhere(void)
{
	stage *x = setup();
	uint64_t serial;
	shmq_queue_desc *other = world_view(x->w, world_queue(x->w, x->topic, "d", &serial))->q;
	shmq_consumer *c = world_consumer(x->w, x->b, 1, serial, 1000);
	uint32_t head, got;
	shmq_message m;

	for (int i = 0; i < 300; i++) {
		publish(x, "x");
		EQUAL(shmq_take(c, &m, 1, soon(), &got), 0);
		EQUAL(shmq_finish(c, &m, 1, NULL, soon()), 0);
	}
	head = ld(&other->free_head);
	for (int i = 0; i < 5; i++)
		EQUAL(world_publish(x->w, x->b, x->p, "y"), SHMQ_FULL);
	EQUAL(ld(&other->free_head), head);
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
	teardown(x);
}

/* 7 */
static void a_loans_channels_are_read_again_at_its_commit(void)
{
	stage *x = setup();
	uint64_t id, gone, come;
	uint32_t queue = world_queue(x->w, x->topic, "gone", &gone), got;
	shmq_consumer *c;
	shmq_loan *loan;
	shmq_message m;

	EQUAL(MAPPED(x->w, x->b, shmq_loan_begin(x->p, 1, soon(), &loan)), 0);
	*(char *)shmq_loan_data(loan) = 'z';
	EQUAL(shmq_queue_remove(x->s, queue, gone, false, soon()), 0);
	queue = world_queue(x->w, x->topic, "come", &come);
	EQUAL(MAPPED(x->w, x->b, shmq_loan_commit(loan, 0, soon(), &id)), 0);
	shmq_loan_free(loan);
	expect(x, "z");
	c = world_consumer(x->w, x->b, queue, come, 10);
	EQUAL(shmq_take(c, &m, 1, soon(), &got), 0);
	CHECK(body_is(&m, "z"));
	EQUAL(m.id, id);
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
	teardown(x);
}

static void lend_and_die(stage *x)
{
	shmq_loan *loan;

	EQUAL(shmq_loan_begin(x->p, 1, soon(), &loan), 0);
	EQUAL(lock_take(&x->b->topics[x->topic].publish, 0), 0);
}

/* 7: kept by the rebuild that its owner's death causes; freed by the reaper */
static void a_dead_ones_loan_is_freed_by_the_reaper(void)
{
	stage *x = setup();
	uint32_t returned;

	a_death(x, lend_and_die);
	publish(x, "a");
	EQUAL(ring_count(&x->q->free_head, &x->q->free_tail), ld(&x->q->slots_committed) - 2);
	SOUND(x->w);
	EQUAL(world_reap(x->w, x->s, &returned), 1);
	EQUAL(ring_count(&x->q->free_head, &x->q->free_tail), ld(&x->q->slots_committed) - 1);
	expect(x, "a");
	teardown(x);
}

static void take_pin_and_finish(stage *x)
{
	shmq_message m = take(x);

	EQUAL(shmq_pin(x->c, &m, soon()), 0);
	EQUAL(shmq_finish(x->c, &m, 1, NULL, soon()), 0);
}

static void take_pin_finish_and_die_with_the_lock(stage *x)
{
	take_pin_and_finish(x);
	hold_the_deliver_lock(x);
}

/* 8 */
static void finished_and_pinned_is_neither_free_nor_in_flight(void)
{
	stage *x = setup();
	shmq_message m;
	uint32_t returned;

	publish(x, "abc");
	m = take(x);
	EQUAL(shmq_pin(x->c, &m, soon()), 0);
	EQUAL(shmq_finish(x->c, &m, 1, NULL, soon()), 0);
	a_death(x, take_pin_finish_and_die_with_the_lock); /* b */
	EQUAL(world_reap(x->w, x->s, &returned), 1);
	EQUAL(returned, 0); /* finished is finished, the reaper does not bring it back */
	rebuild(x);
	for (int i = 0; i < 150; i++) {
		publish(x, "-");
		CHECK(body_is(&m, "a"));
	}
	expect(x, "c");
	for (int i = 0; i < 150; i++)
		expect(x, "-");
	EQUAL(shmq_unpin(x->c, &m, soon()), 0);
	EQUAL(ring_count(&x->q->free_head, &x->q->free_tail), ld(&x->q->slots_committed));
	teardown(x);
}

/* 8: also when it went to disk in between */
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
	EQUAL(SHMQ_STATE_OF(ld(&x->map->slots[m.slot].word)), SHMQ_DONE);
	SOUND(x->w);
	for (int i = 0; i < 150; i++)
		publish(x, "-");
	CHECK(body_is(&m, "a"));
	EQUAL(shmq_unpin(x->c, &m, soon()), 0);
	restore_all(x);
	expect(x, "a");
	teardown(x);
}

static void hold_both_locks(stage *x)
{
	EQUAL(lock_take(&x->b->topics[x->topic].publish, 0), 0);
	hold_the_deliver_lock(x);
}

/* 9 */
static void who_cannot_finish_a_repair_leaves_the_lock_usable(void)
{
	stage *x = setup();
	uint64_t serial, id;
	shmq_body body = {"b", 1};
	shmq_broker *late;
	shmq_producer *p;
	uint32_t returned;

	(void)world_queue(x->w, x->topic, "d", &serial);
	publish(x, "a");
	a_death(x, hold_both_locks);
	late = world_attach(x->w, SHMQ_AS_CLIENT);
	EQUAL(shmq_producer_open(late, x->topic, x->generation, &p), 0);
	EQUAL(shmq_publish(p, &body, 1, 0, soon(), &id), SHMQ_NEED_MAP); /* cannot repair yet */
	EQUAL(ld(&late->topics[x->topic].dirty), 1);
	EQUAL(lock_take(&late->topics[x->topic].publish, 0), 0); /* and is in nobody's way */
	lock_drop(&late->topics[x->topic].publish);
	EQUAL(MAPPED(x->w, late, shmq_publish(p, &body, 1, 0, soon(), &id)), 0);
	EQUAL(ld(&late->topics[x->topic].dirty), 0);
	EQUAL(MAPPED(x->w, x->s, shmq_rebuild(x->s, 1, soon())), 0);
	EQUAL(world_reap(x->w, x->s, &returned), 1);
	expect(x, "ab");
	shmq_producer_close(p);
	EQUAL(shmq_broker_detach(late, soon()), 0);
	shmq_broker_close(late);
	teardown(x);
}

/* 9: D died alone, P is busy: the repair waits for P, it does not start under D */
static void a_queue_is_never_repaired_under_its_deliver_lock_alone(void)
{
	stage *x = setup();
	shmq_message m;
	uint32_t got, returned;
	pid_t pid;

	publish(x, "ab");
	a_death(x, hold_the_deliver_lock);
	pid = stopped(x, true);
	EQUAL(shmq_take(x->c, &m, 1, 0, &got), SHMQ_AGAIN);
	EQUAL(ld(&x->q->dirty), 1);
	go_on(pid);
	expect(x, "ab");
	EQUAL(ld(&x->q->dirty), 0);
	EQUAL(world_reap(x->w, x->s, &returned), 1);
	teardown(x);
}

/* 10 */
static void a_take_over_half_done_is_still_a_backlog(void)
{
	world *w = world_start(small_limits(300, 100));
	uint32_t generation, topic = world_topic(w, "t", &generation), queue, again, got;
	shmq_broker *b = world_attach(w, SHMQ_AS_CLIENT);
	shmq_producer *p;
	shmq_consumer *c;
	shmq_message m;
	uint64_t serial, other;

	queue = world_queue(w, topic, NULL, &serial);
	EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
	EQUAL(world_publish(w, b, p, "a"), 0);
	strcpy(b->entries[queue].name, "c"); /* named; dead before the role was stored */
	st(&world_view(w, queue)->q->base_pending, 1);
	EQUAL(shmq_queue_find(b, topic, "c", &again, &other), SHMQ_GONE);
	EQUAL(shmq_queue_find(b, topic, NULL, &again, &other), 0);
	EQUAL(world_publish(w, b, p, "b"), 0);
	EQUAL(shmq_queue_take_over(w->supervisor, topic, "d", soon(), &again, &other), 0);
	EQUAL(again, queue);
	EQUAL(shmq_queue_find(b, topic, "d", &again, &other), 0);
	c = world_consumer(w, b, queue, serial, 10);
	EQUAL(shmq_take(c, &m, 1, soon(), &got), 0);
	CHECK(body_is(&m, "a"));
	SOUND(w);
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
	shmq_producer_close(p);
	EQUAL(shmq_broker_detach(b, soon()), 0);
	shmq_broker_close(b);
	world_stop(w);
}

/* 11 */
static void the_commit_word_decides_what_was_being_moved(void)
{
	stage *x = setup();
	uint64_t committed, serial;
	uint32_t moved;
	shmq_map *backlog;
	shmq_slot_desc *s;

	EQUAL(shmq_topic_pause(x->b, x->topic, x->generation, true, soon()), 0);
	backlog = world_view(x->w, world_queue(x->w, x->topic, NULL, &serial));
	publish(x, "ab");
	committed = ld(&x->b->topics[x->topic].committed);
	s = &backlog->slots[backlog->ready[ld(&backlog->q->ready_head) & ld(&backlog->q->ring_mask)]];
	s->previous = SHMQ_READY;
	s->move = committed + 1; /* not decided */
	st(&s->word, word_next(ld(&s->word), SHMQ_MOVING));
	EQUAL(shmq_rebuild(x->s, backlog->index, soon()), 0);
	EQUAL(SHMQ_STATE_OF(ld(&s->word)), SHMQ_READY);
	SOUND(x->w);
	s->move = committed; /* decided: it is in the channels */
	st(&s->word, word_next(ld(&s->word), SHMQ_MOVING));
	EQUAL(shmq_rebuild(x->s, backlog->index, soon()), 0);
	EQUAL(SHMQ_STATE_OF(ld(&s->word)), SHMQ_FREE);
	SOUND(x->w);
	EQUAL(shmq_topic_pause(x->b, x->topic, x->generation, false, soon()), 0);
	publish(x, "c"); /* behind b, which is still in the backlog */
	EQUAL(MAPPED(x->w, x->s, shmq_pump(x->s, x->topic, x->generation, 10, soon(), &moved)), 0);
	EQUAL(moved, 2);
	publish(x, "d");
	expect(x, "bcd");
	teardown(x);
}

/* 12 */
static void empty_leaves_what_is_lent_or_viewed(void)
{
	stage *x = setup();
	shmq_body later = {"later", 5};
	shmq_message m, pinned;
	shmq_loan *loan;
	uint64_t dropped, id;

	publish(x, "abcdef");
	pinned = take(x);
	EQUAL(shmq_pin(x->c, &pinned, soon()), 0);
	EQUAL(shmq_finish(x->c, &pinned, 1, NULL, soon()), 0);
	m = take(x);
	EQUAL(shmq_requeue(x->c, &m, 1, 0, NULL, soon()), 0);
	m = take(x);
	EQUAL(shmq_publish(x->p, &later, 1, shmq_realtime() + NS_PER_S, soon(), &id), 0);
	EQUAL(shmq_loan_begin(x->p, 1, soon(), &loan), 0);
	begin_spill(x, 1, SHMQ_SPILL_READY);
	EQUAL(shmq_queue_empty(x->b, x->queue, x->serial, soon(), &dropped), 0);
	EQUAL(dropped, 6);
	EQUAL(shmq_finish(x->c, &m, 1, NULL, soon()), SHMQ_NOT_IN_FLIGHT);
	EQUAL(shmq_spill_end(x->s, &x->spill, x->spill.bytes, true, soon()), SHMQ_GONE);
	CHECK(body_is(&pinned, "a"));
	SOUND(x->w);
	*(char *)shmq_loan_data(loan) = 'z';
	EQUAL(shmq_loan_commit(loan, 0, soon(), &id), 0);
	shmq_loan_free(loan);
	EQUAL(shmq_unpin(x->c, &pinned, soon()), 0);
	expect(x, "z");
	EQUAL(ring_count(&x->q->free_head, &x->q->free_tail), ld(&x->q->slots_committed));
	teardown(x);
}

static void take_three(stage *x)
{
	for (int i = 0; i < 3; i++)
		(void)take(x);
}

/* 13 */
static void a_dead_ones_entry_is_freed_last(void)
{
	stage *x = setup();
	shmq_client_desc *entry;
	shmq_dead dead[2];
	uint32_t found, returned;
	pid_t pid;

	publish(x, "abcd");
	a_death(x, take_three);
	EQUAL(shmq_reap_scan(x->s, dead, 2, &found), 0);
	EQUAL(found, 1);
	entry = &x->b->clients[dead[0].client];
	pid = stopped(x, false);
	EQUAL(shmq_reap(x->s, dead[0].client, dead[0].generation, 0, &returned), SHMQ_AGAIN);
	EQUAL(ld(&entry->state), SHMQ_CLIENT_LIVE); /* its messages are still to be found by it */
	EQUAL(ld(&entry->generation), dead[0].generation);
	EQUAL(shmq_reap_scan(x->s, dead, 2, &found), 0);
	EQUAL(found, 1);
	go_on(pid);
	EQUAL(shmq_reap(x->s, dead[0].client, dead[0].generation, soon(), &returned), 0);
	EQUAL(returned, 3);
	EQUAL(ld(&entry->state), SHMQ_CLIENT_FREE);
	EQUAL(shmq_reap(x->s, dead[0].client, dead[0].generation, soon(), &returned), SHMQ_GONE);
	expect(x, "abcd");
	teardown(x);
}

/* 15 */
static void a_slot_used_again_is_not_taken_for_the_message_that_was_in_it(void)
{
	stage *x = setup();
	shmq_consumer *other = world_consumer(x->w, x->b, x->queue, x->serial, 10);
	shmq_message old, m;
	uint32_t expired, due, got;

	publish(x, "a");
	old = take(x);
	EQUAL(old.attempts, 1);
	EQUAL(shmq_expire(x->s, x->queue, shmq_now() + 100 * NS_PER_S, 0, 10, soon(), &expired, &due), 0);
	EQUAL(shmq_take(other, &m, 1, soon(), &got), 0);
	EQUAL(shmq_finish(other, &m, 1, NULL, soon()), 0);
	do { /* until the same slot comes again, with the same owner and the same attempts */
		publish(x, "b");
		m = take(x);
		if (m.slot != old.slot)
			EQUAL(shmq_finish(x->c, &m, 1, NULL, soon()), 0);
	} while (m.slot != old.slot);
	EQUAL(m.attempts, old.attempts);
	EQUAL(SHMQ_OWNER_OF(m.word), SHMQ_OWNER_OF(old.word));
	CHECK(!shmq_message_held(x->c, &old));
	CHECK(shmq_message_held(x->c, &m));
	EQUAL(shmq_finish(x->c, &old, 1, NULL, soon()), SHMQ_NOT_IN_FLIGHT);
	rebuild(x); /* does not lower a generation either */
	CHECK(!shmq_message_held(x->c, &old));
	EQUAL(shmq_finish(x->c, &m, 1, NULL, soon()), 0);
	EQUAL(shmq_consumer_close(other, soon()), 0);
	shmq_consumer_free(other);
	teardown(x);
}

/* 17 */
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
	EQUAL(shmq_expire(x->s, x->queue, 0, due_at, 10, soon(), &expired, &due), 0);
	EQUAL(due, 1);
	expect(x, "d");
	nothing_to_take(x);
	restore_all(x);
	expect(x, "abc");
	teardown(x);
}

/* 17: published and due, and the publisher died before the flip */
static void a_decided_deferred_message_is_deferred_by_the_rebuild(void)
{
	stage *x = setup();
	shmq_body body = {"d", 1};
	int64_t due_at = shmq_realtime() + NS_PER_S;
	uint32_t slot, expired, due;
	uint64_t id;

	EQUAL(shmq_publish(x->p, &body, 1, due_at, soon(), &id), 0);
	slot = x->map->defer[ld(&x->q->defer_head) & ld(&x->q->ring_mask)];
	st(&x->map->slots[slot].word, word_next(ld(&x->map->slots[slot].word), SHMQ_PREPARED));
	st(&x->q->defer_tail, ld(&x->q->defer_head));
	rebuild(x);
	SOUND(x->w);
	nothing_to_take(x);
	EQUAL(shmq_expire(x->s, x->queue, 0, due_at, 10, soon(), &expired, &due), 0);
	EQUAL(due, 1);
	expect(x, "d");
	teardown(x);
}

/* 18 */
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

/* 18: dead before the write position: everything is back once, in flight first */
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

/* 19 */
static void without_a_supervisor_what_is_in_memory_goes_on(void)
{
	stage *x = setup();
	uint32_t moved;

	publish(x, "abcdef");
	EQUAL(shmq_advance(x->s, x->queue, 2, soon(), &moved), 0);
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

/* 21 */
static void ids_rise_whatever_the_clock_and_the_past_say(void)
{
	stage *x = setup();
	uint64_t ahead = (uint64_t)(shmq_realtime() - SHMQ_EPOCH_NS) / SHMQ_ID_UNIT_NS + (UINT64_C(1) << 36);
	shmq_body bodies[3] = {{"a", 1}, {"b", 1}, {"c", 1}};
	uint32_t topic, generation, queue;
	uint64_t first, next, serial;
	shmq_producer *p;

	EQUAL(shmq_topic_create(x->s, "u", ahead, soon(), &topic, &generation), 0);
	queue = world_queue(x->w, topic, "c", &serial);
	EQUAL(shmq_producer_open(x->b, topic, generation, &p), 0);
	EQUAL(MAPPED(x->w, x->b, shmq_publish(p, bodies, 3, 0, soon(), &first)), 0);
	EQUAL(first >> SHMQ_ID_NODE_BITS, ahead + 1);
	EQUAL(first & 1023, 5);
	EQUAL(ld(&x->b->topics[topic].id_clock), ahead + 3);
	/* dead between the clock's store and the commit: the numbers are not given again */
	st(&x->b->topics[topic].id_clock, ahead + 103);
	EQUAL(shmq_publish(p, bodies, 1, 0, soon(), &next), 0);
	EQUAL(next >> SHMQ_ID_NODE_BITS, ahead + 104);
	EQUAL(shmq_rebuild(x->s, queue, soon()), 0);
	EQUAL(ld(&x->b->topics[topic].id_clock), ahead + 104);
	shmq_producer_close(p);
	teardown(x);
}

int main(void)
{
	nothing_overtakes_what_is_being_written_to_disk();
	a_rebuild_during_a_spill_leaves_its_slots_alone();
	emptied_slots_are_not_freed_again_by_the_spill();
	the_write_position_alone_decides_what_is_on_disk();
	sequence_numbers_are_not_given_twice_when_nothing_is_left();
	a_loan_has_its_number_from_its_commit();
	a_successor_finds_what_the_dead_supervisor_had_in_hand();
	restored_messages_come_before_ready_ones_whatever_their_numbers();
	a_restore_of_what_was_emptied_meanwhile_is_refused();
	a_half_restored_slot_is_free_again();
	only_a_holder_of_the_deliver_lock_pushes_free_slots();
	a_refused_publish_takes_no_slot_anywhere();
	a_loans_channels_are_read_again_at_its_commit();
	a_dead_ones_loan_is_freed_by_the_reaper();
	finished_and_pinned_is_neither_free_nor_in_flight();
	a_pinned_message_that_is_spilled_keeps_its_bytes();
	who_cannot_finish_a_repair_leaves_the_lock_usable();
	a_queue_is_never_repaired_under_its_deliver_lock_alone();
	a_take_over_half_done_is_still_a_backlog();
	the_commit_word_decides_what_was_being_moved();
	empty_leaves_what_is_lent_or_viewed();
	a_dead_ones_entry_is_freed_last();
	a_slot_used_again_is_not_taken_for_the_message_that_was_in_it();
	a_deferred_message_does_not_wait_behind_the_disk();
	a_decided_deferred_message_is_deferred_by_the_rebuild();
	what_is_flushed_cannot_be_finished_any_more();
	a_flush_that_died_gives_everything_back_once();
	without_a_supervisor_what_is_in_memory_goes_on();
	ids_rise_whatever_the_clock_and_the_past_say();
	return 0;
}
