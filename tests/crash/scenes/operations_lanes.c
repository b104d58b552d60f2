/* One consumer of many queues: opening it, taking, waiting, waking it. */
#include "operations.h"

static shmq_lanes *lanes;

static void open_lanes(scene *s)
{
	static const uint32_t weights[] = {2, 1};

	EQUAL(WATCHED(shmq_lanes_open(s->mine, true, true, weights, 2, 3, &lanes)), 0);
	EQUAL(WATCHED(shmq_lanes_add(lanes, s->my_consumer, 1, s)), 0);
}

static void come_with_lanes(scene *s)
{
	come(s);
	s->my_consumer = consume(s, s->mine, 0);
}

static void come_and_open_lanes(scene *s)
{
	come_with_lanes(s);
	open_lanes(s);
}

static void take_by_lanes(scene *s)
{
	void *tag;

	s->ledger->takers++;
	EQUAL(WATCHED(shmq_lanes_take(lanes, s->m, 4, soon(), &s->got, &tag)), 0);
	EQUAL(s->got, 3);
	CHECK(tag == s);
	CHECK(!WATCHED(shmq_lanes_look(lanes)));
}

static void nothing_is_left(scene *s)
{
	take_alive(s, 4);
	finish(s, 0, s->consumer, s->m, 4);
}

static void wait_by_lanes(scene *s)
{
	void *tag;
	int r;

	EQUAL(WATCHED(shmq_lanes_take(lanes, s->m, 1, soon(), &s->got, &tag)), SHMQ_EMPTY);
	r = WATCHED(shmq_lanes_wait(lanes, shmq_now() + SECOND / 1000));
	CHECK(r == 0 || r == SHMQ_TIMEOUT);
}

static void come_and_wait_by_lanes(scene *s)
{
	come_and_open_lanes(s);
	wait_by_lanes(s);
}

static void leave_lanes(scene *s)
{
	watch_begin();
	shmq_lanes_limit(lanes, 1);
	shmq_lanes_settled(lanes);
	shmq_lanes_wake(lanes);
	shmq_lanes_pass(lanes);
	shmq_lanes_remove(lanes, s->my_consumer);
	EQUAL(shmq_lanes_add(lanes, s->my_consumer, 0, s), 0);
	EQUAL(shmq_lanes_wait(lanes, shmq_now()), 0);
	shmq_lanes_close(lanes);
	watch_end();
}

/* A client waits for many queues, of which one is queue 0. No thread is there to be woken. */
static void somebody_waits_for_many(scene *s)
{
	nothing_is_left(s);
	somebody_waits(s);
	waiters_of(s)[BELL].turn = SHMQ_TURN_ASLEEP;
}

static void publish_to_lanes(scene *s)
{
	publish(s, s->mine, s->my_producer, 1, SMALL, 0);
}

static void waiter_was_told(scene *s)
{
	uint32_t hint = first_queue(s) % SHMQ_HINTS;
	const shmq_waiter_desc *w = &waiters_of(s)[BELL];
	int rings;

	CHECK(!sem_getvalue((sem_t *)&w->bell, &rings));
	if (!rings || !(w->hints[hint / 64] >> hint % 64 & 1))
		wrong("a waiter for many queues %s", rings ? "was rung without a hint" : "sleeps on");
}

static const operation table[] = {
	{"open lanes", 1, NULL, come_with_lanes, open_lanes, NULL, 0, 0, 0},
	{"take by lanes", 1, eight_more, come_and_open_lanes, take_by_lanes, NULL, 0, 0, 0},
	{"wait by lanes", 1, nothing_is_left, come_and_open_lanes, wait_by_lanes, NULL, 0, 0, 0},
	{"leave lanes", 1, nothing_is_left, come_and_wait_by_lanes, leave_lanes, NULL, 0, 0, 0},
	{"publish to lanes", 1, somebody_waits_for_many, come, publish_to_lanes, waiter_was_told, 0, 0,
	 0},
};

const operations lanes_operations = {table, sizeof(table) / sizeof(table[0])};
