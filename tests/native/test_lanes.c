/* One consumer of many queues: which lane is next, the limit, lanes that come and go. */
#include "lanes_stage.h"

#include <pthread.h>

static void lanes_of_one_level_take_turns(void)
{
	static const uint32_t one = 1, level[LANES] = {0, 0, 0, 0};
	stage x = setup();
	uint32_t got;

	open_lanes(&x, false, &one, 1, 100, level, LANES);
	EQUAL(take(&x, 1, &got), LANES);
	for (uint32_t i = 0; i < LANES; i++)
		publish(&x, i, 3);
	takes(&x, "abcdabcdabcd");
	EQUAL(take(&x, 1, &got), LANES);
	publish(&x, 3, 2);
	publish(&x, 1, 1);
	takes(&x, "bdd");
	publish(&x, 0, 5);
	publish(&x, 2, 5);
	EQUAL(take(&x, 4, &got), 0);
	EQUAL(got, 4);
	EQUAL(take(&x, 16, &got), 2);
	EQUAL(got, 5);
	takes(&x, "a");
	close_lanes(&x);
	teardown(x);
}

static void strict_serves_a_level_while_those_before_are_empty(void)
{
	static const uint32_t weights[] = {1, 1, 1}, level[LANES] = {0, 1, 1, 2};
	stage x = setup();
	uint32_t got;

	open_lanes(&x, true, weights, 3, 100, level, LANES);
	for (uint32_t i = LANES; i--;)
		publish(&x, i, 2);
	takes(&x, "aabc");
	publish(&x, 0, 1);
	takes(&x, "abcd");
	publish(&x, 2, 1);
	takes(&x, "cd");
	EQUAL(take(&x, 1, &got), LANES);
	close_lanes(&x);
	teardown(x);
}

/* A waiter of the first queue is woken for a message there, so no hint comes here. Still nothing of
 * the second one is handed out before it. */
static void strict_looks_into_the_queues(void)
{
	static const uint32_t weights[] = {1, 1}, level[] = {0, 1};
	stage x = setup();
	uint32_t got, bell;

	open_lanes(&x, true, weights, 2, 100, level, 2);
	EQUAL(take(&x, 1, &got), LANES);
	bell = bell_of(&x);
	st(&x.map[0]->q->takers.rotor, bell + 1);
	wait_announce(&x.map[0]->q->takers, bell + 1);
	publish(&x, 0, 1);
	CHECK(rung(&x, bell + 1));
	CHECK(announced(&x, 0, bell));
	publish(&x, 1, 1);
	takes(&x, "ab");
	close_lanes(&x);
	teardown(x);
}

static void weights_are_shares_of_messages(void)
{
	static const uint32_t weights[] = {8, 4, 1}, level[] = {0, 1, 2};
	stage x = setup();
	uint32_t counts[LANES] = {0}, got;

	open_lanes(&x, false, weights, 3, 100, level, 3);
	for (uint32_t i = 0; i < 3; i++)
		publish(&x, i, 200);
	for (uint32_t i = 0; i < 130; i++) {
		uint32_t lane = take(&x, 1, &got);

		counts[lane]++;
		if (i == 12 || i == 129) {
			EQUAL(counts[0], 8 * (i + 1) / 13);
			EQUAL(counts[1], 4 * (i + 1) / 13);
			EQUAL(counts[2], (i + 1) / 13);
		}
	}
	/* One that had nothing for long does not make up for it. */
	while (take(&x, 16, &got) != LANES)
		;
	publish(&x, 2, 100);
	for (uint32_t i = 0; i < 50; i++)
		takes(&x, "c");
	publish(&x, 0, 40);
	memset(counts, 0, sizeof(counts));
	takes(&x, "aaaaaaaaa");
	for (uint32_t i = 0; i < 18; i++)
		counts[take(&x, 1, &got)]++;
	EQUAL(counts[0], 16);
	EQUAL(counts[2], 2);
	close_lanes(&x);
	teardown(x);
}

static void the_limit_is_over_all_lanes(void)
{
	static const uint32_t one = 1, level[] = {0, 0};
	stage x = setup();
	shmq_message m[8];
	uint32_t got;
	void *tag;

	open_lanes(&x, false, &one, 1, 3, level, 2);
	publish(&x, 0, 4);
	publish(&x, 1, 4);
	EQUAL(shmq_lanes_take(x.l, m, 2, soon(), &got, &tag), 0);
	EQUAL(got, 2);
	EQUAL(shmq_lanes_take(x.l, m + 2, 2, soon(), &got, &tag), 0);
	EQUAL(got, 1);
	CHECK(tag == &x.c[1]);
	CHECK(!shmq_lanes_look(x.l));
	EQUAL(shmq_lanes_take(x.l, m + 3, 2, soon(), &got, &tag), SHMQ_EMPTY);
	EQUAL(shmq_lanes_wait(x.l, shmq_now() + NS_PER_MS), SHMQ_TIMEOUT);
	EQUAL(shmq_finish(x.c[0], m, 1, NULL, soon()), 0);
	CHECK(shmq_lanes_look(x.l));
	EQUAL(shmq_lanes_take(x.l, m + 3, 2, soon(), &got, &tag), 0);
	EQUAL(got, 1);
	shmq_lanes_limit(x.l, 5);
	EQUAL(shmq_lanes_take(x.l, m + 4, 4, soon(), &got, &tag), 0);
	EQUAL(got, 2);
	close_lanes(&x);
	teardown(x);
}

typedef struct settler {
	stage *x;
	const shmq_message *m;
} settler;

static void *settle_when_it_waits(void *argument)
{
	settler *s = argument;
	uint32_t bell = bell_of(s->x);

	while (ld(&s->x->b->waiters[bell].turn) != SHMQ_TURN_LIMITED)
		sched_yield();
	EQUAL(shmq_finish(s->x->c[0], s->m, 1, NULL, soon()), 0);
	shmq_lanes_settled(s->x->l);
	return NULL;
}

static void a_finish_ends_the_wait_for_the_limit(void)
{
	static const uint32_t one = 1, level[] = {0, 0};
	stage x = setup();
	shmq_message m[2];
	settler s = {&x, m};
	pthread_t thread;
	uint32_t got;
	void *tag;
	int r;

	open_lanes(&x, false, &one, 1, 1, level, 2);
	publish(&x, 0, 1);
	publish(&x, 1, 1);
	EQUAL(shmq_lanes_take(x.l, m, 1, soon(), &got, &tag), 0);
	EQUAL(pthread_create(&thread, NULL, settle_when_it_waits, &s), 0);
	while ((r = shmq_lanes_take(x.l, m + 1, 1, soon(), &got, &tag)) == SHMQ_EMPTY)
		EQUAL(shmq_lanes_wait(x.l, soon()), 0);
	EQUAL(r, 0);
	CHECK(tag == &x.c[1]);
	EQUAL(pthread_join(thread, NULL), 0);
	close_lanes(&x);
	teardown(x);
}

static void a_lane_whose_lock_is_held_is_passed_over(void)
{
	static const uint32_t weights[] = {1, 1}, level[LANES] = {0, 0, 1, 1};
	stage x = setup();
	shmq_message m;
	uint32_t got;
	void *tag;

	open_lanes(&x, true, weights, 2, 100, level, LANES);
	for (uint32_t i = 0; i < 3; i++)
		publish(&x, i, 2);
	EQUAL(queue_lock(x.w->supervisor, x.map[0], soon()), 0);
	takes(&x, "bb");
	/* The level behind it waits: the first one has a message. */
	EQUAL(shmq_lanes_take(x.l, &m, 1, 0, &got, &tag), SHMQ_AGAIN);
	EQUAL(shmq_lanes_take(x.l, &m, 1, shmq_now() + NS_PER_MS, &got, &tag), SHMQ_AGAIN);
	queue_unlock(x.map[0]);
	takes(&x, "aacc");
	close_lanes(&x);
	teardown(x);
}

static void lanes_come_and_go(void)
{
	static const uint32_t one = 1, level[LANES] = {0, 0, 0, 0};
	stage x = setup();
	uint32_t got, bell;

	open_lanes(&x, false, &one, 1, 100, level, LANES);
	EQUAL(take(&x, 1, &got), LANES);
	bell = bell_of(&x);
	publish(&x, 3, 2);
	publish(&x, 1, 1);
	takes(&x, "b");
	shmq_lanes_remove(x.l, x.c[0]);
	shmq_lanes_remove(x.l, x.c[0]);
	CHECK(!announced(&x, 0, bell));
	takes(&x, "dd");
	publish(&x, 0, 1);
	EQUAL(take(&x, 1, &got), LANES);
	EQUAL(shmq_lanes_add(x.l, x.c[0], 0, &x.c[0]), 0);
	EQUAL(shmq_lanes_add(x.l, x.c[0], 1, &x.c[0]), SHMQ_INVALID);
	takes(&x, "a");
	for (uint32_t i = 0; i < LANES; i++)
		shmq_lanes_remove(x.l, x.c[i]);
	EQUAL(take(&x, 1, &got), LANES);
	for (int i = 0; i < 500; i++) { /* many more than fit at first */
		EQUAL(shmq_lanes_add(x.l, x.c[i % LANES], 0, &x.c[i % LANES]), 0);
		if (i % 5 == 4)
			shmq_lanes_remove(x.l, x.c[i % LANES]);
	}
	publish(&x, 2, 3);
	takes(&x, "ccc");
	shmq_lanes_close(x.l);
	EQUAL(shmq_lanes_take(x.l, NULL, 1, soon(), &got, NULL), SHMQ_CLOSED);
	EQUAL(shmq_lanes_wait(x.l, soon()), SHMQ_CLOSED);
	CHECK(shmq_lanes_look(x.l));
	close_lanes(&x);
	teardown(x);
}

static void what_cannot_be_is_refused(void)
{
	static const uint32_t none = 0, much = SHMQ_WEIGHT_MOST + 1, one = 1;
	stage x = setup();
	shmq_lanes *l;

	EQUAL(shmq_lanes_open(x.b, true, false, &one, 0, 1, &l), SHMQ_INVALID);
	EQUAL(shmq_lanes_open(x.b, true, false, &none, 1, 1, &l), SHMQ_INVALID);
	EQUAL(shmq_lanes_open(x.b, true, false, &much, 1, 1, &l), SHMQ_INVALID);
	teardown(x);
}

static void a_deleted_queue_is_named_by_its_tag(void)
{
	static const uint32_t one = 1, level[LANES] = {0, 0, 0, 0};
	stage x = setup();
	shmq_message m;
	uint32_t got;
	void *tag;

	open_lanes(&x, false, &one, 1, 100, level, LANES);
	EQUAL(take(&x, 1, &got), LANES);
	EQUAL(MAPPED(x.w, x.w->supervisor,
	             shmq_queue_remove(x.w->supervisor, x.queue[1], x.serial[1], false, soon())),
	      0);
	EQUAL(shmq_lanes_take(x.l, &m, 1, soon(), &got, &tag), SHMQ_GONE);
	CHECK(tag == &x.c[1]);
	shmq_lanes_remove(x.l, x.c[1]);
	publish(&x, 2, 1);
	takes(&x, "c");
	shmq_lanes_close(x.l);
	shmq_lanes_free(x.l);
	teardown(x);
}

int main(void)
{
	lanes_of_one_level_take_turns();
	strict_serves_a_level_while_those_before_are_empty();
	strict_looks_into_the_queues();
	weights_are_shares_of_messages();
	the_limit_is_over_all_lanes();
	a_finish_ends_the_wait_for_the_limit();
	a_lane_whose_lock_is_held_is_passed_over();
	lanes_come_and_go();
	what_cannot_be_is_refused();
	a_deleted_queue_is_named_by_its_tag();
	return 0;
}
