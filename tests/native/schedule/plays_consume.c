/* Plays: publish, take, finish, requeue, wait, loans, requests of clients. */
#include "stage.h"

void publish_one_0(void)
{
	publish(0, 1, 0);
}

void publish_batch_0(void)
{
	publish(0, 2, 0);
}

static void publish_batch_1(void)
{
	publish(1, 3, 0);
}

static void publish_twice_0(void)
{
	publish(0, 1, 0);
	publish(0, 1, 0);
}

void publish_deferred_0(void)
{
	publish(0, 2, in_an_hour());
}

void take_one_1(void)
{
	take(1, 0, 1);
	finish(1, 0, 1);
}

void take_two_1(void)
{
	take(1, 0, 2);
	finish(1, 0, 2);
}

static void take_one_2(void)
{
	take(2, 0, 1);
	finish(2, 0, 1);
}

static void take_other_2(void)
{
	take(2, 1, 1);
	finish(2, 1, 1);
}

void finish_1(void)
{
	finish(1, 0, 8);
}

void requeue_1(void)
{
	(void)shmq_requeue(k->actors[1].c, k->actors[1].m, k->actors[1].got, 0, NULL, soon());
}

void touch_1(void)
{
	(void)shmq_touch(k->actors[1].c, k->actors[1].m, k->actors[1].got, NULL, soon());
}

void close_1(void)
{
	EQUAL(shmq_consumer_close(k->actors[1].c, soon()), 0);
}

void wait_1(void)
{
	take_and_wait(1, 1);
}

static void wait_2(void)
{
	take_and_wait(2, 1);
}

static void begin_publish_and_take(void)
{
	begin(1);
	come_to_publish(0);
	come_to_take(1, 0);
}

static void begin_publish_and_take_wrapping(void)
{
	begin(1);
	about_to_wrap();
	publish(EARLY, 1, 0);
	come_to_publish(0);
	come_to_take(1, 0);
}

static void begin_two_publish(void)
{
	begin(2);
	come_to_publish(0);
	come_to_publish(1);
	come_to_take(2, 1);
}

static void begin_publish_and_two_take(void)
{
	begin(1);
	publish(EARLY, 1, 0);
	come_to_publish(0);
	come_to_take(1, 0);
	come_to_take(2, 0);
}

static void begin_publish_and_two_wait(void)
{
	begin(1);
	come_to_publish(0);
	come_to_take(1, 0);
	come_to_take(2, 0);
}

void begin_in_flight(void)
{
	begin(1);
	publish(EARLY, 3, 0);
	come_to_publish(0);
	come_to_take(1, 0);
	schedule_as(1);
	take(1, 0, 2);
	schedule_as(OUTSIDE);
	k->out_of_order = true;
}

void empty_2(void)
{
	uint64_t dropped;

	k->dropped[0] = true;
	EQUAL(MAPPED(k->w, k->actors[2].b,
	             shmq_queue_empty(k->actors[2].b, k->queue[0], k->serial[0], soon(), &dropped)),
	      0);
}

static void pin_finish_unpin_1(void)
{
	actor *a = &k->actors[1];

	EQUAL(shmq_pin(a->c, a->m, soon()), 0);
	finish(1, 0, 1);
	if (memcmp(a->m[0].body, "000", 3))
		schedule_fail("a pinned body was overwritten");
	EQUAL(shmq_unpin(a->c, a->m, soon()), 0);
}

void loan_and_commit_0(void)
{
	actor *a = &k->actors[0];
	uint32_t number = a->next++;
	shmq_loan *loan;
	uint64_t id;
	int r;

	EQUAL(MAPPED(k->w, a->b, shmq_loan_begin(a->p, BODY, soon(), &loan)), 0);
	body_make(shmq_loan_data(loan), number);
	k->published[number] = BEGUN;
	k->group[number] = (uint8_t)number;
	r = MAPPED(k->w, a->b, shmq_loan_commit(loan, 0, soon(), &id));
	CHECK(!r || r == SHMQ_GONE);
	k->published[number] = r ? REFUSED : RETURNED;
	if (r)
		EQUAL(shmq_loan_cancel(loan, soon()), 0);
}

static void loan_and_cancel_0(void)
{
	shmq_loan *loan;

	EQUAL(MAPPED(k->w, k->actors[0].b, shmq_loan_begin(k->actors[0].p, BODY, soon(), &loan)), 0);
	EQUAL(shmq_loan_cancel(loan, soon()), 0);
}

void begin_with_supervisor(void)
{
	begin(1);
	publish(EARLY, 4, 0);
	come_to_publish(0);
	come_to_take(1, 0);
	come(2, SHMQ_AS_CLIENT);
	come_to_supervise(3);
}

void begin_taken(void)
{
	begin_with_supervisor();
	schedule_as(1);
	take(1, 0, 2);
	schedule_as(OUTSIDE);
	k->out_of_order = true;
}

void take_other_1(void)
{
	take(1, 1, 1);
	finish(1, 1, 1);
}

void finish_rest_1(void)
{
	finish(1, 0, 8);
}

static void requeue_with_delay_1(void)
{
	(void)shmq_requeue(k->actors[1].c, k->actors[1].m, k->actors[1].got, NS_PER_S, NULL, soon());
}

static shmq_held held_by_1(uint32_t i)
{
	return (shmq_held){.serial = k->serial[0], .id = k->actors[1].m[i].id, .queue = k->queue[0]};
}

/* Its consumer may be finishing it, too: one of the two does. */
static void finish_held_2(void)
{
	uint8_t *finished = &k->finished[0][k->actors[1].number[0]];
	shmq_broker *b = k->actors[2].b;
	shmq_held m = held_by_1(0);
	int r;

	if (*finished != TAKEN)
		*finished = AWAY;
	r = MAPPED(k->w, b, shmq_held_finish(b, &m, soon()));
	if (!r) {
		CHECK(*finished != TAKEN);
		*finished = TAKEN;
	}
	CHECK(!r || r == SHMQ_NOT_IN_FLIGHT);
}

static void requeue_held_2(void)
{
	shmq_broker *b = k->actors[2].b;

	for (uint32_t i = 0; i < 2; i++) {
		shmq_held m = held_by_1(i);
		int r = MAPPED(k->w, b, shmq_held_requeue(b, &m, i ? NS_PER_S : 0, soon()));

		CHECK(!r || r == SHMQ_NOT_IN_FLIGHT);
	}
}

static const play table[] = {
	/* the actors: 0 publishes, 1 takes, 2 one or the other, 3 supervises */
	PLAY("publish, take", begin_publish_and_take, publish_one_0, take_one_1),
	PLAY("publish, take, indices wrap", begin_publish_and_take_wrapping, publish_batch_0,
	     take_two_1),
	PLAY("publish, publish a batch, take", begin_two_publish, publish_one_0, publish_batch_1,
	     take_other_2),
	PLAY("publish, take, take", begin_publish_and_two_take, publish_one_0, take_one_1, take_one_2),
	PLAY("publish, wait", begin_publish_and_take, publish_one_0, wait_1),
	PLAY("publish a batch, wait, wait", begin_publish_and_two_wait, publish_batch_0, wait_1,
	     wait_2),
	PLAY("publish, publish, wait, wait", begin_publish_and_two_wait, publish_twice_0, wait_1,
	     wait_2),
	PLAY("publish, finish", begin_in_flight, publish_batch_0, finish_1),
	PLAY("publish, requeue", begin_in_flight, publish_one_0, requeue_1),
	PLAY("publish, requeue with a delay", begin_in_flight, publish_deferred_0,
	     requeue_with_delay_1),
	PLAY("publish, close", begin_in_flight, publish_one_0, close_1),
	PLAY("publish, pin, finish, unpin", begin_in_flight, publish_batch_0, pin_finish_unpin_1),
	PLAY("lend and commit, take", begin_publish_and_take, loan_and_commit_0, take_one_1),
	PLAY("lend and cancel, finish", begin_in_flight, loan_and_cancel_0, finish_1),
	PLAY("finish, finish what it holds", begin_taken, NULL, finish_1, finish_held_2),
	PLAY("requeue, finish what it holds", begin_taken, NULL, requeue_1, finish_held_2),
	PLAY("touch, finish what it holds", begin_taken, publish_one_0, touch_1, finish_held_2),
	PLAY("finish, requeue what it holds", begin_taken, NULL, finish_1, requeue_held_2),
	PLAY("close, requeue what it holds", begin_taken, NULL, close_1, requeue_held_2),
	PLAY("expire, requeue what it holds", begin_taken, NULL, NULL, requeue_held_2, expire_3),
	PLAY("take, requeue what it holds", begin_taken, NULL, take_one_1, requeue_held_2),
	PLAY("publish, take, empty", begin_with_supervisor, publish_one_0, take_one_1, empty_2),
};

const plays consume_plays = {table, sizeof(table) / sizeof(table[0])};
