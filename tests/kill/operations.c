/* Every operation of shmq.h that stores to shared memory, each in a scene where it has much to do. */
#include "scene.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static uint32_t first_queue(const scene *s)
{
	return s->ledger->queue[0].index;
}

/* ---- publish ---- */

static void publish_one(scene *s)
{
	publish(s, s->mine, s->my_producer, 1, SMALL, 0);
}

static void publish_three(scene *s)
{
	publish(s, s->mine, s->my_producer, 3, SMALL, 0);
}

static void publish_large(scene *s)
{
	publish(s, s->mine, s->my_producer, 1, LARGE, 0);
}

static void publish_two_large(scene *s)
{
	publish(s, s->mine, s->my_producer, 2, LARGE, 0);
}

static void publish_deferred(scene *s)
{
	publish(s, s->mine, s->my_producer, 2, SMALL, in_an_hour());
}

static void publish_five(scene *s)
{
	publish(s, s->mine, s->my_producer, 5, SMALL, 0);
}

static void fill_first_slots(scene *s)
{
	publish(s, s->alive, s->producer, 10, SMALL, 0);
}

static void publish_very_large(scene *s)
{
	publish(s, s->mine, s->my_producer, 2, 1500, 0);
}

static void fill_first_arena(scene *s)
{
	publish(s, s->alive, s->producer, 8, 1900, 0);
}

static void fill_to_the_brim(scene *s)
{
	publish(s, s->alive, s->producer, 20, SMALL, 0);
}

static void publish_in_vain(scene *s)
{
	EQUAL(try_publish(s, s->mine, s->my_producer, 2, SMALL, 0), SHMQ_FULL);
}

static void come_and_find_it_full(scene *s)
{
	come(s);
	publish_in_vain(s);
}

static void wait_for_room(scene *s)
{
	int r = WATCHED(shmq_producer_wait(s->my_producer, shmq_now()));

	CHECK(r == 0 || r == SHMQ_TIMEOUT);
}

/* A client waits on queue 0 with a doorbell of its own; it is not there to be woken. */
static void wait_on_first(scene *s, shmq_broker *b, uint32_t bell)
{
	shmq_waiter_desc *w = &waiters_of(s)[bell];
	shmq_waitset_desc *takers = &queue_of(s, 0)->takers;
	uint32_t client = shmq_broker_client(b);

	w->owner = (uint64_t)clients_of(s)[client].generation << 32 | (client + 1);
	if (directory_of(s)->waiters_high <= bell)
		directory_of(s)->waiters_high = bell + 1;
	takers->words[bell / 64] |= UINT64_C(1) << bell % 64;
	takers->summary |= UINT64_C(1) << bell / 64;
}

#define BELL 5u

static void somebody_waits(scene *s)
{
	wait_on_first(s, s->alive, BELL);
}

static void waiter_was_rung(scene *s)
{
	int rings;

	CHECK(!sem_getvalue(&waiters_of(s)[BELL].bell, &rings));
	if (!rings)
		wrong("a waiter sleeps on (its bit is %sset)",
		      queue_of(s, 0)->takers.words[0] >> BELL & 1 ? "" : "not ");
}

static void loan_begin(scene *s)
{
	EQUAL(CALL(s, s->mine, shmq_loan_begin(s->my_producer, 200, soon(), &s->loan)), 0);
}

static void loan_commit(scene *s)
{
	uint32_t number = s->ledger->next++;
	uint8_t *to = shmq_loan_data(s->loan);
	uint64_t id;

	set_fates(s, number, 1, GROUP);
	to[0] = (uint8_t)number;
	for (uint32_t i = 1; i < 200; i++)
		to[i] = (uint8_t)(number * 7 + i);
	EQUAL(CALL(s, s->mine, shmq_loan_commit(s->loan, 0, soon(), &id)), 0);
	set_fates(s, number, 1, DUE);
}

static void lend_and_commit(scene *s)
{
	loan_begin(s);
	loan_commit(s);
}

static void come_and_lend(scene *s)
{
	come(s);
	loan_begin(s);
}

static void loan_cancel(scene *s)
{
	EQUAL(CALL(s, s->mine, shmq_loan_cancel(s->loan, soon())), 0);
}

static void add_channel(scene *s, const char *name)
{
	uint64_t serial;
	uint32_t index = make_queue(s, s->home, name, &serial);

	add_queue(s, index, serial, true);
}

static void lend_then_a_channel_comes(scene *s)
{
	uint64_t serial;
	uint32_t index;

	come_and_lend(s);
	index = make_queue(s, s->mine, "new", &serial);
	add_queue(s, index, serial, true);
}

/* ---- take and what follows ---- */

static void come_to_take(scene *s)
{
	come(s);
	s->my_consumer = consume(s, s->mine, 0);
}

static void take(scene *s, uint32_t n)
{
	s->ledger->takers++;
	EQUAL(WATCHED(shmq_take(s->my_consumer, s->m, n, soon(), &s->got)), 0);
	EQUAL(s->got, n);
}

static void take_one(scene *s)
{
	take(s, 1);
}

static void take_four(scene *s)
{
	take(s, 4);
}

static void come_and_take(scene *s)
{
	come_to_take(s);
	take(s, 3);
}

static void come_now_and_take_one(scene *s)
{
	s->my_consumer = consume(s, s->mine, 0);
	take(s, 1);
}

static void eight_more(scene *s)
{
	publish(s, s->alive, s->producer, 8, SMALL, 0);
}

static void take_alive(scene *s, uint32_t n)
{
	s->ledger->takers++;
	s->consumer = consume(s, s->alive, 0);
	EQUAL(shmq_take(s->consumer, s->m, n, soon(), &s->got), 0);
	EQUAL(s->got, n);
}

static void take_three_alive(scene *s)
{
	eight_more(s);
	take_alive(s, 3);
}

static void some_came_back(scene *s)
{
	take_alive(s, 2);
	EQUAL(shmq_requeue(s->consumer, s->m, 2, 0, NULL, soon()), 0);
}

static void some_are_deferred(scene *s)
{
	publish(s, s->alive, s->producer, 2, SMALL, in_an_hour());
}

static void four_are_deferred(scene *s)
{
	some_are_deferred(s);
	some_are_deferred(s);
}

/* The order counter runs ahead of the publish counter. */
static void much_came_and_went(scene *s)
{
	for (int i = 0; i < 6; i++) {
		take_alive(s, 4);
		EQUAL(shmq_consumer_close(s->consumer, soon()), 0);
		shmq_consumer_free(s->consumer);
	}
	take_alive(s, 4);
	finish(s, 0, s->consumer, s->m, 4);
	eight_more(s);
}

static void finish_one(scene *s)
{
	finish(s, 0, s->my_consumer, s->m, 1);
}

static void finish_three(scene *s)
{
	finish(s, 0, s->my_consumer, s->m, 3);
}

static void pin_one(scene *s)
{
	EQUAL(WATCHED(shmq_pin(s->my_consumer, s->m, soon())), 0);
}

static void unpin_one(scene *s)
{
	EQUAL(WATCHED(shmq_unpin(s->my_consumer, s->m, soon())), 0);
}

static void come_take_and_pin(scene *s)
{
	come_and_take(s);
	pin_one(s);
}

static void come_take_pin_and_finish(scene *s)
{
	come_take_and_pin(s);
	finish_three(s);
}

static void requeue_three(scene *s)
{
	EQUAL(WATCHED(shmq_requeue(s->my_consumer, s->m, 3, 0, NULL, soon())), 0);
}

static void requeue_three_later(scene *s)
{
	EQUAL(WATCHED(shmq_requeue(s->my_consumer, s->m, 3, 60 * SECOND, NULL, soon())), 0);
}

static void touch_three(scene *s)
{
	EQUAL(WATCHED(shmq_touch(s->my_consumer, s->m, 3, NULL, soon())), 0);
}

static void open_consumer(scene *s)
{
	s->my_consumer = consume(s, s->mine, 0);
}

static void limit_and_tell(scene *s)
{
	watch_begin();
	shmq_consumer_limit(s->my_consumer, 7);
	shmq_consumer_pass(s->my_consumer);
	shmq_consumer_wake(s->my_consumer);
	watch_end();
}

static void close_consumer(scene *s)
{
	EQUAL(WATCHED(shmq_consumer_close(s->my_consumer, soon())), 0);
}

static void nothing_is_there(scene *s)
{
	take_alive(s, 4);
	finish(s, 0, s->consumer, s->m, 4);
}

static void wait_a_moment(scene *s)
{
	EQUAL(WATCHED(shmq_consumer_wait(s->my_consumer, shmq_now())), SHMQ_TIMEOUT);
}

static void wait_for_many(scene *s)
{
	uint32_t ready, count;
	shmq_waiter *waiter;
	int r;

	EQUAL(WATCHED(shmq_waiter_open(s->mine, &waiter)), 0);
	r = WATCHED(shmq_waiter_wait(waiter, &s->my_consumer, 1, shmq_now() + SECOND / 1000, &ready, &count));
	CHECK(r == 0 || r == SHMQ_TIMEOUT);
	EQUAL(count, 0);
	watch_begin();
	shmq_waiter_wake(waiter);
	shmq_waiter_close(waiter);
	watch_end();
}

/* ---- the supervisor's scan ---- */

static void expire_in_flight(scene *s)
{
	uint32_t expired, due;

	EQUAL(WATCHED(shmq_expire(s->mine, first_queue(s), shmq_now() + 100 * SECOND, 0, 100, soon(),
	                          &expired, &due)),
	      0);
	EQUAL(expired, 3);
}

static void expire_due(scene *s)
{
	uint32_t expired, due;

	for (uint32_t i = 0; i < s->ledger->next; i++)
		s->ledger->due[i] = 0;
	EQUAL(WATCHED(shmq_expire(s->mine, first_queue(s), 0, INT64_MAX, 100, soon(), &expired, &due)), 0);
	EQUAL(due, 2);
}

/* ---- leases ---- */

static void lessee_open(scene *s, shmq_broker *b)
{
	EQUAL(CALL(s, b, shmq_lessee_open(b, first_queue(s), s->ledger->queue[0].serial, "reader", SECOND, 1,
	                                  soon(), &s->lessee)),
	      0);
}

static void lease(scene *s, shmq_broker *b, uint32_t n)
{
	EQUAL(WATCHED(shmq_lease_take(b, &s->lessee, s->lease.id, n, UINT64_MAX, 2, NULL, soon(),
	                              &s->lease)),
	      0);
	EQUAL(s->lease.count, n);
}

static void come_to_lease(scene *s)
{
	come(s);
	lessee_open(s, s->mine);
}

static void come_and_lease(scene *s)
{
	come_to_lease(s);
	lease(s, s->mine, 2);
	lease(s, s->mine, 1);
}

static void lease_alive(scene *s)
{
	lessee_open(s, s->alive);
	lease(s, s->alive, 2);
	lease(s, s->alive, 1);
}

static void lessee_open_again(scene *s)
{
	lessee_open(s, s->mine);
	EQUAL(WATCHED(shmq_lessee_touch(s->mine, &s->lessee, soon())), 0);
	EQUAL(WATCHED(shmq_lessee_close(s->mine, &s->lessee, soon())), 0);
}

static void lease_three(scene *s)
{
	lease(s, s->mine, 3);
}

static void look_at_leases(scene *s)
{
	shmq_lease found[2];
	uint32_t count;

	EQUAL(WATCHED(shmq_lease_list(s->mine, &s->lessee, found, 2, soon(), &count)), 0);
	EQUAL(count, 2);
	EQUAL(WATCHED(shmq_lease_look(s->mine, &s->lessee, s->lease.id, true, soon(), found)), 0);
	EQUAL(WATCHED(shmq_lease_wait(s->mine, &s->lessee, shmq_now())), 0);
}

static void finish_leases(scene *s)
{
	uint64_t messages;

	for (uint32_t i = 0; i < 3; i++)
		s->ledger->fate[0][i] = EITHER;
	EQUAL(WATCHED(shmq_lease_finish(s->mine, &s->lessee, s->lease.id, soon(), &messages)), 0);
	EQUAL(messages, 3);
	for (uint32_t i = 0; i < 3; i++)
		s->ledger->fate[0][i] = DONE;
}

static void return_leases(scene *s)
{
	uint64_t messages;

	EQUAL(WATCHED(shmq_lease_return(s->mine, &s->lessee, s->lease.id, soon(), &messages)), 0);
	EQUAL(messages, 1);
	EQUAL(WATCHED(shmq_lease_return(s->mine, &s->lessee, s->lease.parent, soon(), &messages)), 0);
	EQUAL(messages, 2);
}

static void end_leases(scene *s)
{
	uint64_t messages;

	EQUAL(WATCHED(shmq_lease_end(s->mine, first_queue(s), s->ledger->queue[0].serial, s->lease.id, true,
	                             soon(), &messages)),
	      0);
	s->ledger->fate[0][0] = s->ledger->fate[0][1] = EITHER;
	EQUAL(WATCHED(shmq_lease_end(s->mine, first_queue(s), s->ledger->queue[0].serial, s->lease.parent,
	                             false, soon(), &messages)),
	      0);
	s->ledger->fate[0][0] = s->ledger->fate[0][1] = DONE;
}

static void expire_leases(scene *s)
{
	uint32_t expired, due;

	EQUAL(WATCHED(shmq_expire(s->mine, first_queue(s), shmq_now() + 100 * SECOND, 0, 100, soon(),
	                          &expired, &due)),
	      0);
	EQUAL(queue_of(s, 0)->leased, 0);
}

/* A lease is whole: as many messages as it says, each once, in parts that make up all of it. */
static void leases_are_whole(scene *s)
{
	const shmq_queue_desc *q = queue_of(s, 0);
	const shmq_lease_desc *leases = (const void *)((const uint8_t *)q + q->leases_at);
	const shmq_slot_desc *slots = (const void *)((const uint8_t *)q + q->slots_at);
	uint32_t leased = 0;

	for (uint32_t i = 0; q->leases_committed && i < SHMQ_LEASES; i++) {
		uint32_t slot = leases[i].first[0], n = 0;

		if (!leases[i].word)
			continue;
		EQUAL(leases[i].word & 0xff, SHMQ_LEASE_HELD);
		for (; slot < q->slots_committed && n <= leases[i].count; slot = slots[slot].next, n++) {
			EQUAL(slots[slot].word & 0xff, SHMQ_LEASED);
			EQUAL(slots[slot].move, leases[i].word >> 8);
			EQUAL(slots[slot].turn, n);
			for (uint32_t p = 0; p < leases[i].parts; p++)
				if (n == p * leases[i].count / leases[i].parts)
					EQUAL(leases[i].first[p], slot);
		}
		EQUAL(n, leases[i].count);
		leased += n;
	}
	EQUAL(q->leased, leased);
	if (q->run.lease) {
		EQUAL(leases[q->run.lease % SHMQ_LEASES].word, q->run.lease << 8 | SHMQ_LEASE_HELD);
		EQUAL(leases[q->run.lease % SHMQ_LEASES].on_disk, q->run.count);
		EQUAL(q->run.from, q->disk_read);
	}
}

/* ---- marks ---- */

/* Two messages with always the same mark: only the first time they are published. */
static int publish_two_marked(scene *s, shmq_broker *b, shmq_producer *p)
{
	shmq_mark mark = {.key = {7, 8}, .epoch = 0, .after = 0, .upto = 2};
	uint32_t first = s->ledger->next;
	shmq_body bodies[2];
	uint64_t id;
	int r;

	for (uint32_t i = 0; i < 2; i++)
		bodies[i] = (shmq_body){body_make(first + i, SMALL), SMALL};
	set_fates(s, first, 2, GROUP);
	s->ledger->next += 2;
	s->ledger->marked = s->ledger->marked ? s->ledger->marked : first;
	r = CALL(s, b, shmq_publish_marked(p, bodies, 2, &mark, soon(), &id));
	set_fates(s, first, 2, r ? NEVER : DUE);
	for (uint32_t i = 0; i < 2; i++)
		free((void *)(uintptr_t)bodies[i].data);
	return r;
}

static void publish_marked(scene *s)
{
	EQUAL(publish_two_marked(s, s->mine, s->my_producer), 0);
}

/* Again, as after a death: it goes through if it had not, and then the first ones are not there. */
static void publish_marked_again(scene *s)
{
	uint32_t first = s->ledger->marked;
	int r = publish_two_marked(s, s->alive, s->producer);

	CHECK(r == 0 || r == SHMQ_REPEATED);
	set_fates(s, first, 2, r ? DUE : NEVER);
	EQUAL(publish_two_marked(s, s->alive, s->producer), SHMQ_REPEATED);
}

static void read_mark(scene *s)
{
	uint64_t key[2] = {7, 8};
	shmq_mark mark;

	EQUAL(CALL(s, s->mine, shmq_mark_read(s->my_producer, key, soon(), &mark)), 0);
	CHECK(mark.epoch == 1 && mark.upto == 2);
}

/* What a death right after the commit word leaves. */
static void come_and_publish_half_marked(scene *s)
{
	shmq_writer_desc *w = (void *)(s->files->map[0] + directory_of(s)->writers_at);

	come(s);
	publish_marked(s);
	w->epoch = w->rows = 0;
	w->next_seq = topics_of(s)[s->topic].committed;
}

static void publish_after_the_mark(scene *s)
{
	EQUAL(publish_two_marked(s, s->mine, s->my_producer), SHMQ_REPEATED);
}

/* ---- overflow ---- */

static void advance(scene *s, shmq_broker *b, uint32_t n)
{
	uint32_t moved;

	EQUAL(CALL(s, b, shmq_advance(b, first_queue(s), n, soon(), &moved)), 0);
	EQUAL(moved, n);
}

static void advance_four(scene *s)
{
	advance(s, s->mine, 4);
}

static void spill_begin(scene *s, shmq_broker *b, enum shmq_spill_from from, uint32_t n)
{
	uint64_t at = s->ledger->written;

	EQUAL(CALL(s, b, shmq_spill_begin(b, first_queue(s), from, n, 1 << 16, soon(), &s->spill)), 0);
	CHECK(at + s->spill.bytes <= sizeof(s->ledger->disk));
	EQUAL(WATCHED(shmq_spill_encode(b, &s->spill, s->ledger->disk + at)), 0);
	for (uint32_t i = 0; i < s->spill.count; at += s->spill.lengths[i++])
		s->spill.positions[i] = at;
}

static void spill_end(scene *s, shmq_broker *b)
{
	EQUAL(WATCHED(shmq_spill_end(b, &s->spill, s->ledger->written + s->spill.bytes, true, soon())), 0);
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

static void a_bit_of_everything(scene *s)
{
	eight_more(s);
	some_are_deferred(s);
	take_alive(s, 4);
	EQUAL(shmq_requeue(s->consumer, s->m, 1, 0, NULL, soon()), 0);
	EQUAL(shmq_requeue(s->consumer, s->m + 1, 1, 60 * SECOND, NULL, soon()), 0);
	advance(s, s->home, 2);
	some_are_deferred(s);
}

static void spill_what_came_back(scene *s)
{
	spill_begin(s, s->mine, SHMQ_SPILL_RETURNED, 2);
	EQUAL(s->spill.count, 2);
	spill_end(s, s->mine);
}

/* They are the first to be taken again. */
static void come_and_give_back(scene *s)
{
	come_to_supervise(s);
	s->my_consumer = consume(s, s->mine, 0);
	take(s, 2);
	EQUAL(shmq_consumer_close(s->my_consumer, soon()), 0);
	EQUAL(shmq_spill_begin(s->mine, first_queue(s), SHMQ_SPILL_RETURNED, 2, 1 << 16, soon(), &s->spill),
	      SHMQ_EMPTY);
}

static void spill_what_was_out(scene *s)
{
	spill_begin(s, s->mine, SHMQ_SPILL_OUT, 2);
	EQUAL(s->spill.count, 2);
	spill_end(s, s->mine);
}

static void flush(scene *s)
{
	spill_begin(s, s->mine, SHMQ_SPILL_ALL, 64);
	spill_end(s, s->mine);
}

static void come_and_spill(scene *s)
{
	come_to_supervise(s);
	advance_four(s);
	spill_six(s);
}

/* The four that came back, and the six on disk behind them, where they lie. */
static void lease_on_disk(scene *s)
{
	uint64_t at[2] = {0, s->spill.positions[3]};
	shmq_run run = {0, s->ledger->written, 6 * SMALL, 6, 2, at};

	EQUAL(WATCHED(shmq_lease_take(s->mine, &s->lessee, 0, 64, UINT64_MAX, 2, &run, soon(), &s->lease)), 0);
	EQUAL(s->lease.count, 10);
	EQUAL(s->lease.on_disk, 6);
}

static void come_to_lease_on_disk(scene *s)
{
	come_and_spill(s);
	lessee_open(s, s->mine);
}

static void come_and_lease_on_disk(scene *s)
{
	come_to_lease_on_disk(s);
	lease_on_disk(s);
}

static void finish_what_is_on_disk(scene *s)
{
	uint64_t messages;

	for (uint32_t i = 0; i < 10; i++)
		s->ledger->fate[0][i] = EITHER;
	EQUAL(WATCHED(shmq_lease_finish(s->mine, &s->lessee, s->lease.id, soon(), &messages)), 0);
	EQUAL(messages, 10);
	for (uint32_t i = 0; i < 10; i++)
		s->ledger->fate[0][i] = DONE;
}

static void return_what_is_on_disk(scene *s)
{
	uint64_t messages;

	EQUAL(WATCHED(shmq_lease_return(s->mine, &s->lessee, s->lease.id, soon(), &messages)), 0);
	EQUAL(messages, 10);
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

/* The read position jumps over what is on disk: as damaged, it is set aside. */
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

/* As another broker left it: nothing of it is on disk any more. What was read stays. */
static void take_up_files(scene *s)
{
	uint64_t end = s->ledger->written;

	watch_begin();
	EQUAL(shmq_disk_adopt(s->mine, first_queue(s), end, end, 0, 0, soon()), 0);
	shmq_names_written(s->mine, 1, 2);
	shmq_disk_trouble_set(s->mine, 28);
	watch_end();
}

static void unrestore_six(scene *s)
{
	uint32_t count;

	EQUAL(WATCHED(shmq_unrestore(s->mine, first_queue(s), soon(), &count)), 0);
	EQUAL(count, 6);
}

/* Of what was read from disk some is in flight, the rest waits; more is still there. */
static void come_and_read_some(scene *s)
{
	uint64_t half, used;
	uint32_t taken;

	come_to_supervise(s);
	advance_four(s);
	spill_begin(s, s->mine, SHMQ_SPILL_READY, 4);
	spill_end(s, s->mine);
	half = s->ledger->written;
	spill_begin(s, s->mine, SHMQ_SPILL_READY, 4);
	spill_end(s, s->mine);
	EQUAL(shmq_restore(s->mine, first_queue(s), s->ledger->disk, half, 0, half, soon(), &taken, &used), 0);
	EQUAL(taken, 4);
	s->my_consumer = consume(s, s->mine, 0);
	take(s, 5);
	finish(s, 0, s->my_consumer, s->m, 4);
}

/* What was read from disk waits; nothing is there any more, and younger ones are ready. */
static void come_and_read_all(scene *s)
{
	uint64_t used;
	uint32_t taken;

	come_to_supervise(s);
	spill_begin(s, s->mine, SHMQ_SPILL_READY, 4);
	spill_end(s, s->mine);
	EQUAL(shmq_restore(s->mine, first_queue(s), s->ledger->disk, s->ledger->written, 0,
	                   s->ledger->written, soon(), &taken, &used), 0);
	EQUAL(taken, 4);
}

static void write_before_disk(scene *s, enum shmq_spill_from from, uint32_t count, bool ok)
{
	EQUAL(WATCHED(shmq_spill_begin(s->mine, first_queue(s), from, 64, 0, soon(), &s->spill)), 0);
	EQUAL(s->spill.count, count);
	EQUAL(WATCHED(shmq_spill_encode(s->mine, &s->spill, s->ledger->disk + s->spill.position)), 0);
	EQUAL(WATCHED(shmq_spill_end(s->mine, &s->spill, 0, ok, soon())), 0);
}

static void write_ahead(scene *s)
{
	write_before_disk(s, SHMQ_SPILL_AHEAD, 4, true);
	EQUAL(s->spill.position, 0);
}

static void write_ahead_in_vain(scene *s)
{
	write_before_disk(s, SHMQ_SPILL_AHEAD, 4, false);
}

/* One is in flight and stays. */
static void write_in_front(scene *s)
{
	write_before_disk(s, SHMQ_SPILL_FRONT, 3, true);
	EQUAL(s->spill.position, s->spill.bytes / 3);
}

static void write_all_in_front(scene *s)
{
	write_before_disk(s, SHMQ_SPILL_FRONT, 4, true);
	EQUAL(s->spill.position, 0);
}

static void write_in_front_in_vain(scene *s)
{
	write_before_disk(s, SHMQ_SPILL_FRONT, 4, false);
}

/* ---- chunks ---- */

static void chunk_begin(scene *s, shmq_broker *b)
{
	EQUAL(CALL(s, b, shmq_chunk_begin(b, first_queue(s), 1, INT64_MIN, 3, 1 << 10, soon(), &s->spill)), 0);
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

static void everything_and_a_chunk(scene *s)
{
	four_are_deferred(s);
	chunk_begin(s, s->home);
	EQUAL(shmq_spill_end(s->home, &s->spill, 0, true, soon()), 0);
	CHECK(load_chunk(s, s->home, 1));
}

static void half_a_chunk(scene *s)
{
	four_are_deferred(s);
	chunk_begin(s, s->home);
}

/* The supervisor comes to the end of its chunk: what empty took is gone, the rest is written. */
static void the_chunk_ends(scene *s)
{
	int r = CALL(s, s->home, shmq_spill_end(s->home, &s->spill, 0, true, soon()));

	CHECK(r == 0 || r == SHMQ_GONE);
	if (r)
		s->ledger->chunk_count = 0;
}

/* ---- topics and channels ---- */

/* A backlog of all kinds, and two channels made while the topic was paused. */
static void a_backlog_to_move(scene *s)
{
	some_are_deferred(s);
	advance(s, s->home, 2);
	EQUAL(shmq_topic_pause(s->alive, s->topic, s->generation, true, soon()), 0);
	add_channel(s, "a");
	add_channel(s, "b");
	EQUAL(shmq_topic_pause(s->alive, s->topic, s->generation, false, soon()), 0);
	for (uint32_t i = 0; i < s->ledger->next; i++)
		s->ledger->fate[1][i] = s->ledger->fate[2][i] = NEVER;
	s->ledger->targets = 1;
	s->ledger->moves = true;
}

static int pump_with(scene *s, shmq_broker *b, uint32_t *moved)
{
	return CALL(s, b, shmq_pump(b, s->topic, s->generation, 100, soon(), moved));
}

static void pump(scene *s)
{
	uint32_t moved;

	EQUAL(pump_with(s, s->mine, &moved), 0);
	EQUAL(moved, 6);
}

static void pump_the_rest(scene *s)
{
	uint8_t (*fate)[MESSAGES] = s->ledger->fate;
	uint32_t moved;

	(void)pump_with(s, s->home, &moved);
	memcpy(fate[1], fate[0], MESSAGES);
	memcpy(fate[2], fate[0], MESSAGES);
	memset(fate[0], NEVER, MESSAGES);
	s->ledger->targets = 6;
	s->ledger->moves = false;
}

static void pause_and_go_on(scene *s)
{
	EQUAL(WATCHED(shmq_topic_pause(s->mine, s->topic, s->generation, true, soon())), 0);
	EQUAL(WATCHED(shmq_topic_pause(s->mine, s->topic, s->generation, false, soon())), 0);
	EQUAL(CALL(s, s->mine, shmq_channel_pause(s->mine, first_queue(s), s->ledger->queue[0].serial, true,
	                                          soon())),
	      0);
	EQUAL(WATCHED(shmq_channel_pause(s->mine, first_queue(s), s->ledger->queue[0].serial, false, soon())),
	      0);
}

static void let_go_on(scene *s)
{
	EQUAL(shmq_topic_pause(s->alive, s->topic, s->generation, false, soon()), 0);
	EQUAL(CALL(s, s->alive, shmq_channel_pause(s->alive, first_queue(s), s->ledger->queue[0].serial,
	                                           false, soon())),
	      0);
}

static void everything_and_a_spill(scene *s)
{
	a_bit_of_everything(s);
	spill_begin(s, s->home, SHMQ_SPILL_READY, 5);
}

static void everything_and_a_file(scene *s)
{
	a_bit_of_everything(s);
	spill_begin(s, s->home, SHMQ_SPILL_READY, 4);
	spill_end(s, s->home);
}

static void empty_it(scene *s)
{
	uint64_t dropped;

	for (uint32_t i = 0; i < s->ledger->next; i++)
		s->ledger->fate[0][i] = EITHER;
	EQUAL(CALL(s, s->mine, shmq_queue_empty(s->mine, first_queue(s), s->ledger->queue[0].serial, soon(),
	                                        &dropped)),
	      0);
	EQUAL(dropped, s->ledger->next);
	for (uint32_t i = 0; i < s->ledger->next; i++)
		s->ledger->fate[0][i] = DONE;
}

/* As the_chunk_ends. */
static void the_spill_ends(scene *s)
{
	int r = CALL(s, s->home, shmq_spill_end(s->home, &s->spill, s->spill.bytes, true, soon()));

	CHECK(r == 0 || r == SHMQ_GONE);
	if (!r)
		s->ledger->written = s->spill.bytes;
}

static void create_topic(scene *s)
{
	uint32_t topic, generation;

	EQUAL(WATCHED(shmq_topic_create(s->mine, "another", 0, soon(), &topic, &generation)), 0);
}

static void create_topic_again(scene *s)
{
	uint32_t topic, generation, again, n = 0;

	EQUAL(shmq_topic_create(s->home, "another", 0, soon(), &topic, &generation), 0);
	EQUAL(shmq_topic_find(s->alive, "another", &again, &generation), 0);
	EQUAL(topic, again);
	for (uint32_t i = 0; i < directory_of(s)->topics_committed; i++)
		n += topics_of(s)[i].state == SHMQ_ENTRY_LIVE;
	EQUAL(n, 2);
}

static void create_channel(scene *s)
{
	uint64_t serial;

	(void)make_queue(s, s->mine, "new", &serial);
}

/* Not entered: its segment, ready or not, is made anew. */
static void create_channel_again(scene *s)
{
	uint64_t serial;
	uint32_t index;

	if (!shmq_queue_find(s->alive, s->topic, "new", &index, &serial))
		return;
	index = make_queue(s, s->home, "new", &serial);
	add_queue(s, index, serial, true);
}

static void take_over(scene *s)
{
	uint64_t serial;
	uint32_t index;

	EQUAL(CALL(s, s->mine, shmq_queue_take_over(s->mine, s->topic, "a", soon(), &index, &serial)), 0);
	EQUAL(CALL(s, s->mine, shmq_queue_renamed(s->mine, index, "t:a", soon())), 0);
}

static void take_over_again(scene *s)
{
	uint64_t serial;
	uint32_t index;
	int r = CALL(s, s->home, shmq_queue_take_over(s->home, s->topic, "a", soon(), &index, &serial));

	CHECK(r == 0 || r == SHMQ_INVALID);
	EQUAL(shmq_queue_find(s->alive, s->topic, NULL, &index, &serial), SHMQ_GONE);
	EQUAL(shmq_queue_find(s->alive, s->topic, "a", &index, &serial), 0);
	EQUAL(index, first_queue(s));
	CHECK(queue_of(s, 0)->base_pending || !strcmp(queue_of(s, 0)->base, "t:a"));
	EQUAL(CALL(s, s->home, shmq_queue_renamed(s->home, index, "t:a", soon())), 0);
}

static int remove_queue(scene *s, shmq_broker *b, uint32_t q)
{
	uint64_t serial = s->ledger->queue[q].serial;
	const shmq_queue_desc *desc = queue_of(s, q);

	return CALL(s, b, shmq_queue_remove(b, s->ledger->queue[q].index, serial,
	                                    desc->segment.ready == SHMQ_CLOSED_STATE, soon()));
}

static void forget_queue(scene *s, uint32_t q)
{
	for (uint32_t i = 0; i < s->ledger->next; i++)
		s->ledger->fate[q][i] = EITHER;
	s->ledger->leaving |= 1u << q;
}

static void remove_channel(scene *s)
{
	forget_queue(s, 1);
	EQUAL(remove_queue(s, s->mine, 1), 0);
}

/* Some messages are out; behind their bodies there were larger ones. */
static void much_was_there(scene *s)
{
	publish(s, s->alive, s->producer, 3, SMALL, 0);
	take_alive(s, 3);
	publish(s, s->alive, s->producer, 4, 8000, 0);
	EQUAL(shmq_take(s->consumer, s->m, 4, soon(), &s->got), 0);
	finish(s, 0, s->consumer, s->m, s->got);
	CHECK(queue_of(s, 0)->arena_committed > SHMQ_ARENA_FIRST);
}

static void give_back(scene *s)
{
	uint64_t bytes;

	EQUAL(CALL(s, s->mine, shmq_give_back(s->mine, first_queue(s), soon(), &bytes)), 0);
}

static void give_back_again(scene *s)
{
	uint64_t bytes;

	EQUAL(CALL(s, s->home, shmq_give_back(s->home, first_queue(s), soon(), &bytes)), 0);
	publish(s, s->alive, s->producer, 4, 8000, 0); /* it grows again */
}

static void remove_idle_channel(scene *s)
{
	bool removed;

	forget_queue(s, 1);
	EQUAL(CALL(s, s->mine,
	           shmq_queue_remove_idle(s->mine, s->ledger->queue[1].index, s->ledger->queue[1].serial,
	                                  soon(), &removed)),
	      0);
	CHECK(removed);
}

static void remove_channel_again(scene *s)
{
	int r = remove_queue(s, s->home, 1);

	CHECK(r == 0 || r == SHMQ_GONE);
	EQUAL(entries_of(s)[s->ledger->queue[1].index].state, SHMQ_ENTRY_FREE);
}

static void remove_topic(scene *s)
{
	forget_queue(s, 0);
	EQUAL(remove_queue(s, s->mine, 0), 0);
	EQUAL(WATCHED(shmq_topic_remove(s->mine, s->topic, s->generation, soon())), 0);
}

static void remove_topic_again(scene *s)
{
	uint32_t topic, generation;
	shmq_body body = {"x", 1};
	uint64_t id;

	(void)remove_queue(s, s->home, 0);
	if (!shmq_topic_find(s->alive, "t", &topic, &generation))
		EQUAL(shmq_topic_remove(s->home, topic, generation, soon()), 0);
	EQUAL(shmq_topic_find(s->alive, "t", &topic, &generation), SHMQ_GONE);
	EQUAL(shmq_publish(s->producer, &body, 1, 0, soon(), &id), SHMQ_GONE);
}

/* ---- clients and supervisors ---- */

static void attach_one(scene *s)
{
	EQUAL(WATCHED(shmq_broker_open(s->files->fd[0], &s->mine)), 0);
	EQUAL(WATCHED(shmq_broker_attach(s->mine, SHMQ_AS_CLIENT, soon())), 0);
}

static void attach_to_supervise(scene *s)
{
	s->mine = attach(s, SHMQ_AS_SUPERVISOR);
	supervise(s, s->mine);
}

static void post_request(scene *s)
{
	uint32_t ticket;

	EQUAL(WATCHED(shmq_request_post(s->mine, SHMQ_CREATE_TOPIC, "u", NULL, soon(), &ticket)), 0);
	watch_begin();
	shmq_request_end(s->mine, ticket);
	watch_end();
}

static void somebody_asks(scene *s)
{
	uint32_t ticket;

	EQUAL(shmq_request_post(s->alive, SHMQ_CREATE_TOPIC, "u", NULL, soon(), &ticket), 0);
}

static void answer_request(scene *s)
{
	shmq_request request;

	EQUAL(WATCHED(shmq_request_next(s->mine, soon(), &request)), 0);
	watch_begin();
	shmq_request_answer(s->mine, request.ticket, 0);
	watch_end();
}

/* Abandoned ones are freed; nothing of the dead is left to answer. */
static void no_request_is_left(scene *s)
{
	const shmq_request_desc *requests =
	        (const void *)(s->files->map[0] + directory_of(s)->requests_at);
	shmq_request request;

	EQUAL(shmq_request_next(s->home, soon(), &request), SHMQ_EMPTY);
	for (uint32_t i = 0; i < SHMQ_REQUESTS; i++)
		EQUAL(requests[i].state, SHMQ_REQUEST_FREE);
}

/* It waits still, or has its answer. */
static void the_request_is_there(scene *s)
{
	const shmq_request_desc *requests =
	        (const void *)(s->files->map[0] + directory_of(s)->requests_at);

	CHECK(requests[0].state == SHMQ_REQUEST_POSTED || requests[0].state == SHMQ_REQUEST_DONE);
}

static void come_and_hold_everything(scene *s)
{
	uint32_t ticket;

	come_take_and_pin(s);
	finish_one(s);
	loan_begin(s);
	wait_on_first(s, s->mine, BELL + 1);
	EQUAL(shmq_request_post(s->mine, SHMQ_CREATE_TOPIC, "u", NULL, soon(), &ticket), 0);
}

static void leave(scene *s)
{
	EQUAL(CALL(s, s->mine, shmq_broker_detach(s->mine, soon())), 0);
}

/* In the preparation somebody dies who holds the publish lock (1), the deliver lock (2). */
static void a_death(scene *s, void (*ready)(scene *), unsigned locks)
{
	pid_t pid = fork();
	int status;

	CHECK(pid >= 0);
	if (!pid) {
		ready(s);
		if (locks & 1)
			pthread_mutex_lock(&topics_of(s)[s->topic].publish.mutex);
		if (locks & 2)
			pthread_mutex_lock(&queue_of(s, 0)->deliver.mutex);
		raise(SIGKILL);
	}
	EQUAL(waitpid(pid, &status, 0), pid);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

static void somebody_died(scene *s)
{
	a_death(s, come_and_hold_everything, 0);
}

static void somebody_died_leasing(scene *s)
{
	a_death(s, come_and_lease, 0);
}

static void somebody_died_marking(scene *s)
{
	a_death(s, come_and_publish_half_marked, 1);
}

static void somebody_died_with_both_locks(scene *s)
{
	a_death(s, come_and_take, 3);
}

static void somebody_died_with_the_deliver_lock(scene *s)
{
	a_death(s, come_and_take, 2);
}

/* The order of the slots is not that of the messages. */
static void the_slots_wrap(scene *s)
{
	eight_more(s);
	take_alive(s, 6);
	finish(s, 0, s->consumer, s->m, 6);
	eight_more(s);
}

static void come_and_spill_halfway(scene *s)
{
	come_to_supervise(s);
	advance_four(s);
	spill_begin(s, s->mine, SHMQ_SPILL_READY, 6);
}

static void the_supervisor_died(scene *s)
{
	eight_more(s);
	a_death(s, come_and_spill_halfway, 3);
}

/* The doorbell, what rang it and for which queue. */
static void wait_to_supervise(scene *s)
{
	uint32_t why, queues[64];

	watch_begin();
	shmq_scan_at(s->mine, shmq_now(), shmq_realtime());
	shmq_attend(s->mine, first_queue(s));
	watch_end();
	EQUAL(WATCHED(shmq_supervisor_wait(s->mine, shmq_now(), &why)), 0);
	EQUAL(WATCHED(shmq_attention(s->mine, queues, 64)), 1);
}

static void reap(scene *s)
{
	reap_all(s, s->mine);
}

static void spare_them(scene *s)
{
	uint32_t found;
	shmq_dead dead[4];

	EQUAL(WATCHED(shmq_reap_scan(s->mine, dead, 4, &found)), 0);
	EQUAL(found, 1);
	watch_begin();
	shmq_reap_spare(s->mine, dead[0].client, dead[0].generation);
	watch_end();
}

/* As its process ends at last: its entry is watched by its pid, and is reaped when that is gone. */
static void spared_ones_end(scene *s)
{
	uint32_t returned;

	for (uint32_t i = 0; i < directory_of(s)->clients_committed; i++)
		if (clients_of(s)[i].state == SHMQ_CLIENT_LIVE && clients_of(s)[i].orphan)
			EQUAL(CALL(s, s->home, shmq_reap(s->home, i, clients_of(s)[i].generation, soon(), &returned)),
			      0);
	no_request_is_left(s);
}

static void ask_for_the_supervisor(scene *s)
{
	CHECK(!WATCHED(shmq_supervisor_alive(s->mine)));
}

static void recount_chunks(scene *s)
{
	EQUAL(WATCHED(shmq_chunk_depth(s->mine, first_queue(s), 3, soon())), 0);
}

static void rebuild(scene *s)
{
	EQUAL(WATCHED(shmq_rebuild(s->mine, first_queue(s), soon())), 0);
}

static void adopt(scene *s)
{
	adopt_all(s, s->mine);
}

/* ---- the directory ---- */

static void create_directory(scene *s)
{
	EQUAL(WATCHED(shmq_directory_create(s->files->fd[FILES - 1], &s->limits)), 0);
}

/* Refused, or whole. */
static void directory_is_there(scene *s)
{
	int fd = s->files->fd[FILES - 1], r;
	shmq_broker *b;

	r = shmq_broker_open(fd, &b);
	if (r) {
		EQUAL(r, SHMQ_LAYOUT);
		return;
	}
	EQUAL(shmq_broker_attach(b, SHMQ_AS_SUPERVISOR, soon()), 0);
	EQUAL(shmq_supervise(b, &s->limits, soon()), 0);
	EQUAL(shmq_topic_create(b, "t", 0, soon(), &s->topic, &s->generation), 0);
}

static void close_directory(scene *s)
{
	watch_begin();
	shmq_supervisor_stopping(s->mine);
	shmq_directory_close(s->mine);
	watch_end();
}

/* Nobody attaches to what is closed; else it goes on. */
static void nobody_attaches(scene *s)
{
	shmq_broker *b;
	int r = shmq_broker_open(s->files->fd[0], &b);

	if (!r)
		r = shmq_broker_attach(b, SHMQ_AS_CLIENT, soon());
	CHECK(r == 0 || r == SHMQ_GONE || r == SHMQ_NOT_RUNNING);
}

const operation operations[] = {
	{.name = "create a directory", .act = create_directory, .after = directory_is_there, .channels = 1,
	 .alone = true},
	{"publish to a channel", 1, NULL, come, publish_one, NULL, 0, 0, 0},
	{"publish to three channels", 3, NULL, come, publish_one, NULL, 0, 0, 0},
	{"publish a batch to three channels", 3, NULL, come, publish_three, NULL, 0, 0, 0},
	{"publish a large body", 3, NULL, come, publish_large, NULL, 0, 0, 0},
	{"publish two large bodies", 2, NULL, come, publish_two_large, NULL, 0, 0, 0},
	{"publish deferred", 3, NULL, come, publish_deferred, NULL, 0, 0, 0},
	{"publish into a backlog", 0, NULL, come, publish_three, NULL, 0, 0, 0},
	{"publish while the slots grow", 2, fill_first_slots, come, publish_five, NULL, 0, 0, 0},
	{"publish while the arena grows", 2, fill_first_arena, come, publish_very_large, NULL, 0, 0, 0},
	{"publish in vain", 1, fill_to_the_brim, come, publish_in_vain, NULL, 0, 0, 0},
	{"publish to a waiter", 1, somebody_waits, come, publish_one, waiter_was_rung, 0, 0, 0},
	{"lend and commit", 3, NULL, come, lend_and_commit, NULL, 0, 0, 0},
	{"commit a loan to a new channel", 2, NULL, lend_then_a_channel_comes, loan_commit, NULL, 0, 0, 0},
	{"cancel a loan", 3, NULL, come_and_lend, loan_cancel, NULL, 0, 0, 0},
	{"take one", 1, NULL, come_to_take, take_one, NULL, 0, 0, 0},
	{"take many", 1, NULL, come_to_take, take_four, NULL, 0, 0, 0},
	{"take what came back", 1, some_came_back, come_to_take, take_four, NULL, 0, 1, 0},
	{"take with deferred ones", 1, some_are_deferred, come_to_take, take_four, NULL, 0, 0, 0},
	{"take after much came and went", 1, much_came_and_went, come_to_take, take_four, NULL, 0, 0, 0},
	{"wait for room", 1, fill_to_the_brim, come_and_find_it_full, wait_for_room, NULL, 0, 0, 0},
	{"finish one", 1, NULL, come_and_take, finish_one, NULL, 0, 0, 0},
	{"finish many", 1, NULL, come_and_take, finish_three, NULL, 0, 0, 0},
	{"finish pinned ones", 1, NULL, come_take_and_pin, finish_three, NULL, 0, 0, 0},
	{"requeue", 1, eight_more, come_and_take, requeue_three, NULL, 0, 1, 0},
	{"requeue with a delay", 1, eight_more, come_and_take, requeue_three_later, NULL, 0, 1, 0},
	{"touch", 1, NULL, come_and_take, touch_three, NULL, 0, 0, 0},
	{"pin", 1, NULL, come_and_take, pin_one, NULL, 0, 0, 0},
	{"unpin", 1, NULL, come_take_pin_and_finish, unpin_one, NULL, 0, 0, 0},
	{"open a consumer", 1, NULL, come, open_consumer, NULL, 0, 0, 0},
	{"limit a consumer, wake others", 1, somebody_waits, come_to_take, limit_and_tell, NULL, 0, 0, 0},
	{"close a consumer", 1, somebody_waits, come_and_take, close_consumer, NULL, 0, 0, 0},
	{"wait", 1, nothing_is_there, come_to_take, wait_a_moment, NULL, 0, 0, 0},
	{"wait for many", 1, nothing_is_there, come_to_take, wait_for_many, NULL, 0, 0, 0},
	{"expire in flight", 1, take_three_alive, come_to_supervise, expire_in_flight, NULL, 1, 1, 0},
	{"expire due", 1, some_are_deferred, come_to_supervise, expire_due, NULL, 1, 1, 0},
	{"advance", 1, eight_more, come_to_supervise, advance_four, NULL, 1, 0, 0},
	{"advance after much came and went", 1, much_came_and_went, come_to_supervise, advance_four, NULL, 1, 0,
	 0},
	{"spill", 1, eight_more, come_to_supervise, spill_six, NULL, 1, 0, 0},
	{"spill again", 1, eight_more, come_and_spill, spill_six, NULL, 1, 0, 0},
	{"spill what came back", 1, some_came_back, come_to_supervise, spill_what_came_back, NULL, 1, 1, 0},
	{"spill what was out", 1, eight_more, come_and_give_back, spill_what_was_out, NULL, 1, 1, 0},
	{"spill in vain", 1, eight_more, come_to_supervise, spill_in_vain, NULL, 1, 0, 0},
	{"restore", 1, eight_more, come_and_spill, restore_first, NULL, 1, 0, 0},
	{"jump over damage", 1, eight_more, come_and_spill, jump, NULL, 1, 0, 0},
	{"take up another's files", 1, eight_more, come_spill_and_restore, take_up_files, NULL, 1, 0, 0},
	{"flush", 1, a_bit_of_everything, come_to_supervise, flush, NULL, 1, 1, 0},
	{"flush: unread", 1, eight_more, come_spill_and_restore, unrestore_six, NULL, 1, 0, 0},
	{"flush: write ahead", 1, eight_more, come_and_read_some, write_ahead, NULL, 1, 1, 0},
	{"flush: write ahead in vain", 1, eight_more, come_and_read_some, write_ahead_in_vain, NULL, 1, 1, 0},
	{"write in front", 1, eight_more, come_and_read_some, write_in_front, NULL, 1, 1, 0},
	{"write in front of nothing", 1, eight_more, come_and_read_all, write_all_in_front, NULL, 1, 0, 0},
	{"write in front in vain", 1, eight_more, come_and_read_all, write_in_front_in_vain, NULL, 1, 0, 0},
	{"write a chunk", 1, four_are_deferred, come_to_supervise, write_chunk, NULL, 1, 1, 0},
	{"write a chunk in vain", 1, four_are_deferred, come_to_supervise, write_chunk_in_vain, NULL, 1, 1, 0},
	{"read a chunk", 1, four_are_deferred, come_and_write_chunk, read_chunk, NULL, 1, 1, 0},
	{"recount chunks", 1, four_are_deferred, come_and_write_chunk, recount_chunks, NULL, 1, 1, 0},
	{"pause", 1, somebody_waits, come, pause_and_go_on, let_go_on, 0, 0, 0},
	{"empty", 1, a_bit_of_everything, come, empty_it, NULL, 0, 1, 0},
	{"empty during a spill", 1, everything_and_a_spill, come, empty_it, the_spill_ends, 0, 1, 0},
	{"empty with a file", 1, everything_and_a_file, come, empty_it, NULL, 0, 1, 0},
	{"empty with a chunk", 1, everything_and_a_chunk, come, empty_it, NULL, 0, 1, 0},
	{"empty during a chunk", 1, half_a_chunk, come, empty_it, the_chunk_ends, 0, 1, 0},
	{"create a topic", 1, NULL, come_to_supervise, create_topic, create_topic_again, 1, 0, 0},
	{"create a channel", 2, NULL, come_to_supervise, create_channel, create_channel_again, 1, 0, 0},
	{"take over", 0, NULL, come_to_supervise, take_over, take_over_again, 1, 0, 0},
	{"delete a channel", 2, NULL, come_to_supervise, remove_channel, remove_channel_again, 1, 0, 0},
	{"give memory back", 1, much_was_there, come_to_supervise, give_back, give_back_again, 1, 1, 0},
	{"delete an idle channel", 2, NULL, come_to_supervise, remove_idle_channel, remove_channel_again, 1, 0, 0},
	{"delete a topic", 1, NULL, come_to_supervise, remove_topic, remove_topic_again, 1, 0, 0},
	{"pump", 0, a_backlog_to_move, come_to_supervise, pump, pump_the_rest, 1, 1, 0},
	{"ask the supervisor", 1, NULL, come, post_request, no_request_is_left, 0, 0, 0},
	{"wait for work", 1, somebody_asks, come_to_supervise, wait_to_supervise, NULL, 1, 0, 0},
	{"answer a client", 1, somebody_asks, come_to_supervise, answer_request, the_request_is_there, 1, 0, 0},
	{"attach", 1, NULL, NULL, attach_one, NULL, 0, 0, 0},
	{"attach to supervise", 1, NULL, NULL, attach_to_supervise, NULL, 1, 0, 0},
	{"detach", 2, NULL, come_and_hold_everything, leave, no_request_is_left, 0, 0, 0},
	{"reap", 2, somebody_died, come_to_supervise, reap, no_request_is_left, 1, 0, 0},
	{"spare a client", 2, somebody_died, come_to_supervise, spare_them, spared_ones_end, 1, 0, 0},
	{"ask whether the supervisor lives", 1, the_supervisor_died, come, ask_for_the_supervisor, NULL, 1, 0, 0},
	{"publish after a death", 2, somebody_died_with_both_locks, come, publish_three, NULL, 0, 0, 0},
	{"take after a death", 2, somebody_died_with_the_deliver_lock, come, come_now_and_take_one, NULL, 0, 0,
	 0},
	{"publish with a mark", 3, NULL, come, publish_marked, publish_marked_again, 0, 0, 0},
	{"read a mark after a death", 2, somebody_died_marking, come, read_mark, publish_marked_again, 0, 0, 0},
	{"publish with a mark after a death", 2, somebody_died_marking, come, publish_after_the_mark,
	 publish_marked_again, 0, 0, 0},
	{"open and close a lessee", 1, lease_alive, come, lessee_open_again, leases_are_whole, 0, 0, 0},
	{"lease", 1, NULL, come_to_lease, lease_three, leases_are_whole, 0, 0, 0},
	{"lease what came back", 1, some_came_back, come_to_lease, lease_three, leases_are_whole, 0, 1, 0},
	{"look at leases", 1, NULL, come_and_lease, look_at_leases, leases_are_whole, 0, 0, 0},
	{"finish leases", 1, NULL, come_and_lease, finish_leases, leases_are_whole, 0, 0, 0},
	{"return leases", 1, NULL, come_and_lease, return_leases, leases_are_whole, 0, 0, 0},
	{"end leases", 1, NULL, come_and_lease, end_leases, leases_are_whole, 0, 0, 0},
	{"expire leases", 1, lease_alive, come_to_supervise, expire_leases, leases_are_whole, 1, 0, 0},
	{"lease what is on disk", 1, eight_more, come_to_lease_on_disk, lease_on_disk, leases_are_whole, 1,
	 0, 0},
	{"finish what is on disk", 1, eight_more, come_and_lease_on_disk, finish_what_is_on_disk,
	 leases_are_whole, 1, 0, 0},
	{"return what is on disk", 1, eight_more, come_and_lease_on_disk, return_what_is_on_disk,
	 leases_are_whole, 1, 0, 0},
	{"flush leases", 1, lease_alive, come_to_supervise, flush, leases_are_whole, 1, 0, 0},
	{"reap a lessee", 1, somebody_died_leasing, come_to_supervise, reap, leases_are_whole, 1, 0, 0},
	{"rebuild", 1, a_bit_of_everything, come_to_supervise, rebuild, NULL, 1, 1, 0},
	{"rebuild what has wrapped", 1, the_slots_wrap, come_to_supervise, rebuild, NULL, 1, 0, 0},
	{"adopt", 1, the_supervisor_died, come_to_supervise, adopt, NULL, 1, 0, 0},
	{.name = "close the directory", .channels = 1, .ready = come_to_supervise, .act = close_directory,
	 .after = nobody_attaches, .alone = true},
};
const uint32_t operation_count = sizeof(operations) / sizeof(operations[0]);
