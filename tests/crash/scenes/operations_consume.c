/* Consuming: take, finish, requeue, touch, pin, wait; and what the supervisor's scan expires. */
#include "operations.h"

static void come_to_take(scene *s)
{
	come(s);
	s->my_consumer = consume(s, s->mine, 0);
}

void take(scene *s, uint32_t n)
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

void come_and_take(scene *s)
{
	come_to_take(s);
	take(s, 3);
}

static void come_now_and_take_one(scene *s)
{
	s->my_consumer = consume(s, s->mine, 0);
	take(s, 1);
}

void eight_more(scene *s)
{
	publish(s, s->alive, s->producer, 8, SMALL, 0);
}

void take_alive(scene *s, uint32_t n)
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

void some_came_back(scene *s)
{
	take_alive(s, 2);
	EQUAL(shmq_requeue(s->consumer, s->m, 2, 0, NULL, soon()), 0);
}

void some_are_deferred(scene *s)
{
	publish(s, s->alive, s->producer, 2, SMALL, in_an_hour());
}

void four_are_deferred(scene *s)
{
	some_are_deferred(s);
	some_are_deferred(s);
}

/* The order counter runs ahead of the publish counter. */
void much_came_and_went(scene *s)
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

void finish_one(scene *s)
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

void come_take_and_pin(scene *s)
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
	r = WATCHED(shmq_waiter_wait(waiter, &s->my_consumer, 1, shmq_now() + SECOND / 1000, &ready,
	                             &count));
	CHECK(r == 0 || r == SHMQ_TIMEOUT);
	EQUAL(count, 0);
	CHECK(!WATCHED(shmq_waiter_announce(waiter, s->my_consumer)));
	CHECK(!WATCHED(shmq_waiter_withdraw(waiter, s->my_consumer)));
	watch_begin();
	shmq_waiter_wake(waiter);
	shmq_waiter_close(waiter);
	watch_end();
}

static void expire_in_flight(scene *s)
{
	uint32_t expired, due;

	EQUAL(WATCHED(shmq_expire(s->mine, first_queue(s),
	                          &(shmq_expiry){.now = shmq_now() + 100 * SECOND, .limit = 100},
	                          soon(), &expired, &due)),
	      0);
	EQUAL(expired, 3);
}

static void expire_due(scene *s)
{
	uint32_t expired, due;

	for (uint32_t i = 0; i < s->ledger->next; i++)
		s->ledger->due[i] = 0;
	EQUAL(WATCHED(shmq_expire(s->mine, first_queue(s),
	                          &(shmq_expiry){.realtime = INT64_MAX, .limit = 100}, soon(), &expired,
	                          &due)),
	      0);
	EQUAL(due, 2);
}

static void three_are_held(scene *s)
{
	eight_more(s);
	take_alive(s, 3);
	publish(s, s->alive, s->producer, 2, SMALL, 0);
}

/* The messages that the client that lives on holds. */
static void take_them_away(scene *s, void (*how)(scene *, const shmq_held *))
{
	for (uint32_t i = 0; i < s->got; i++)
		how(s,
		    &(shmq_held){.serial = s->ledger->queue[0].serial,
		                 .id = s->m[i].id,
		                 .queue = first_queue(s),
		                 .pid = i ? 0 : (int32_t)clients_of(s)[shmq_broker_client(s->alive)].pid});
}

static void finish_one_held(scene *s, const shmq_held *m)
{
	EQUAL(CALL(s, s->mine, shmq_held_finish(s->mine, m, soon())), 0);
}

static void requeue_one_held(scene *s, const shmq_held *m)
{
	EQUAL(CALL(s, s->mine, shmq_held_requeue(s->mine, m, 0, soon())), 0);
}

static void requeue_one_held_later(scene *s, const shmq_held *m)
{
	EQUAL(CALL(s, s->mine, shmq_held_requeue(s->mine, m, 60 * SECOND, soon())), 0);
}

static void finish_held(scene *s)
{
	for (uint32_t i = 0; i < s->got; i++)
		s->ledger->fate[0][body_number(s->m[i].body, s->m[i].length)] = EITHER;
	take_them_away(s, finish_one_held);
	for (uint32_t i = 0; i < s->got; i++)
		s->ledger->fate[0][body_number(s->m[i].body, s->m[i].length)] = DONE;
}

static void requeue_held(scene *s)
{
	take_them_away(s, requeue_one_held);
}

static void requeue_held_later(scene *s)
{
	take_them_away(s, requeue_one_held_later);
}

static void somebody_died_with_the_deliver_lock(scene *s)
{
	a_death(s, come_and_take, 2);
}

static const operation table[] = {
	{"take one", 1, NULL, come_to_take, take_one, NULL, 0, 0, 0},
	{"take many", 1, NULL, come_to_take, take_four, NULL, 0, 0, 0},
	{"take what came back", 1, some_came_back, come_to_take, take_four, NULL, 0, 1, 0},
	{"take with deferred ones", 1, some_are_deferred, come_to_take, take_four, NULL, 0, 0, 0},
	{"take after much came and went", 1, much_came_and_went, come_to_take, take_four, NULL, 0, 0,
	 0},
	{"finish one", 1, NULL, come_and_take, finish_one, NULL, 0, 0, 0},
	{"finish many", 1, NULL, come_and_take, finish_three, NULL, 0, 0, 0},
	{"finish pinned ones", 1, NULL, come_take_and_pin, finish_three, NULL, 0, 0, 0},
	{"requeue", 1, eight_more, come_and_take, requeue_three, NULL, 0, 1, 0},
	{"requeue with a delay", 1, eight_more, come_and_take, requeue_three_later, NULL, 0, 1, 0},
	{"touch", 1, NULL, come_and_take, touch_three, NULL, 0, 0, 0},
	{"pin", 1, NULL, come_and_take, pin_one, NULL, 0, 0, 0},
	{"unpin", 1, NULL, come_take_pin_and_finish, unpin_one, NULL, 0, 0, 0},
	{"open a consumer", 1, NULL, come, open_consumer, NULL, 0, 0, 0},
	{"limit a consumer, wake others", 1, somebody_waits, come_to_take, limit_and_tell, NULL, 0, 0,
	 0},
	{"close a consumer", 1, somebody_waits, come_and_take, close_consumer, NULL, 0, 0, 0},
	{"wait", 1, nothing_is_there, come_to_take, wait_a_moment, NULL, 0, 0, 0},
	{"wait for many", 1, nothing_is_there, come_to_take, wait_for_many, NULL, 0, 0, 0},
	{"expire in flight", 1, take_three_alive, come_to_supervise, expire_in_flight, NULL, 1, 1, 0},
	{"expire due", 1, some_are_deferred, come_to_supervise, expire_due, NULL, 1, 1, 0},
	{"finish what another holds", 1, three_are_held, come, finish_held, NULL, 0, 1, 0},
	{"requeue what another holds", 1, three_are_held, come, requeue_held, NULL, 0, 1, 0},
	{"requeue what another holds later", 1, three_are_held, come, requeue_held_later, NULL, 0, 1,
	 0},
	{"take after a death", 2, somebody_died_with_the_deliver_lock, come, come_now_and_take_one,
	 NULL, 0, 0, 0},
};

const operations consume_operations = {table, sizeof(table) / sizeof(table[0])};
