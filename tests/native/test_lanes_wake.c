/* One consumer of many queues: who is woken for what, and what it leaves. */
#include "lanes_stage.h"

#include <pthread.h>
#include <signal.h>

/* One message in one of many queues: one bit is cleared, one hint is left, one ring if it sleeps. */
static void a_waker_tells_which_queue_it_was(void)
{
	static const uint32_t one = 1, level[LANES] = {0, 0, 0, 0};
	stage x = setup();
	shmq_waiter_desc *waiter;
	uint32_t got, bell, hint = x.queue[2] % SHMQ_HINTS;

	open_lanes(&x, false, &one, 1, 100, level, LANES);
	EQUAL(take(&x, 1, &got), LANES);
	bell = bell_of(&x);
	waiter = &x.b->waiters[bell];
	for (uint32_t i = 0; i < LANES; i++)
		CHECK(announced(&x, i, bell));
	EQUAL(ld(&waiter->turn), SHMQ_TURN_AWAKE);
	publish(&x, 2, 2);
	CHECK(!announced(&x, 2, bell) && announced(&x, 0, bell) && announced(&x, 3, bell));
	CHECK(!rung(&x, bell)); /* it is awake */
	EQUAL(ld(&waiter->hints[hint / 64]), UINT64_C(1) << hint % 64);
	EQUAL(shmq_lanes_wait(x.l, soon()), 0); /* there is something: no sleep */
	takes(&x, "cc");
	EQUAL(take(&x, 1, &got), LANES);
	CHECK(announced(&x, 2, bell));
	st(&waiter->turn, SHMQ_TURN_ASLEEP);
	publish(&x, 0, 1);
	EQUAL(ld(&waiter->turn), SHMQ_TURN_AWAKE);
	CHECK(rung(&x, bell));
	publish(&x, 1, 1);
	CHECK(!rung(&x, bell)); /* one sleep, one ring */
	takes(&x, "ab");
	close_lanes(&x);
	EQUAL(ld(&waiter->turn), SHMQ_TURN_PLAIN);
	teardown(x);
}

/* A consumer that is awake may not come for long, so a sleeper is woken too. */
static void a_busy_consumer_of_many_keeps_no_ring(void)
{
	static const uint32_t one = 1, level[] = {0, 0};
	stage x = setup();
	uint32_t got, bell;

	open_lanes(&x, false, &one, 1, 100, level, 2);
	for (int i = 0; i < 20; i++) {
		EQUAL(take(&x, 1, &got), LANES);
		bell = bell_of(&x);
		st(&x.map[0]->q->takers.rotor, bell);
		wait_announce(&x.map[0]->q->takers, 700);
		publish(&x, 0, 1);
		CHECK(rung(&x, 700));
		takes(&x, "a");
	}
	close_lanes(&x);
	teardown(x);
}

/* It slept, was rung for the second queue, and takes from the first one: the ring goes on. */
typedef struct rings {
	stage *x;
	uint32_t bell;
} rings;

static void *publish_when_it_sleeps(void *argument)
{
	rings *r = argument;
	stage *x = r->x;

	while (ld(&x->b->waiters[r->bell].turn) != SHMQ_TURN_ASLEEP)
		sched_yield();
	/* The other queue first, so that the ring is for that one. */
	EQUAL(world_publish(x->w, x->b, x->p[1], "x"), 0);
	EQUAL(world_publish(x->w, x->b, x->p[0], "x"), 0);
	return NULL;
}

static void who_slept_owes_a_ring_to_the_lanes_it_leaves(void)
{
	static const uint32_t weights[] = {1, 1}, level[] = {0, 1};
	stage x = setup();
	rings r = {.x = &x};
	pthread_t thread;
	uint32_t got;

	open_lanes(&x, true, weights, 2, 100, level, 2);
	EQUAL(take(&x, 1, &got), LANES);
	r.bell = bell_of(&x);
	EQUAL(pthread_create(&thread, NULL, publish_when_it_sleeps, &r), 0);
	EQUAL(shmq_lanes_wait(x.l, soon()), 0);
	EQUAL(pthread_join(thread, NULL), 0); /* both messages are there */
	wait_announce(&x.map[1]->q->takers, 700);
	takes(&x, "a");
	CHECK(rung(&x, 700));
	takes(&x, "b");
	wait_announce(&x.map[0]->q->takers, 700);
	shmq_lanes_pass(x.l);
	CHECK(!rung(&x, 700)); /* there is nothing to pass on */
	wait_withdraw(&x.map[0]->q->takers, 700);
	close_lanes(&x);
	teardown(x);
}

/* All doorbells are taken: it polls. Later there is one. */
static void beyond_the_table_it_polls(void)
{
	static const uint32_t one = 1, level[] = {0, 0};
	stage x = setup();
	uint32_t bells[SHMQ_WAITERS], n = 0, got;

	while (!bell_get(x.b, &bells[n]))
		n++;
	open_lanes(&x, false, &one, 1, 100, level, 2);
	EQUAL(take(&x, 1, &got), LANES);
	EQUAL(shmq_lanes_wait(x.l, shmq_now() + NS_PER_MS), SHMQ_TIMEOUT);
	EQUAL(shmq_lanes_wait(x.l, soon()), 0);
	publish(&x, 1, 1);
	takes(&x, "b");
	while (n)
		bell_put(x.b, bells[--n]);
	EQUAL(take(&x, 1, &got), LANES);
	EQUAL(shmq_lanes_wait(x.l, shmq_now() + NS_PER_MS), SHMQ_TIMEOUT);
	publish(&x, 1, 1);
	EQUAL(shmq_lanes_wait(x.l, soon()), 0);
	takes(&x, "b");
	close_lanes(&x);
	teardown(x);
}

static void the_dead_leave_no_bit_and_a_plain_bell(void)
{
	stage x = setup();
	uint32_t returned, bell;
	int status;
	pid_t pid;

	pid = fork();
	if (!pid) {
		static const uint32_t one = 1;
		shmq_broker *b = world_attach(x.w, SHMQ_AS_CLIENT);
		shmq_message m;
		shmq_lanes *l;
		uint32_t got;
		void *tag;

		EQUAL(shmq_lanes_open(b, false, true, &one, 1, 10, &l), 0);
		for (uint32_t i = 0; i < LANES; i++)
			EQUAL(shmq_lanes_add(l, world_consumer(x.w, b, x.queue[i], x.serial[i], 10), 0, &x), 0);
		alarm(60);
		for (;;)
			if (shmq_lanes_take(l, &m, 1, soon(), &got, &tag))
				(void)shmq_lanes_wait(l, soon());
	}
	for (uint32_t i = 0; i < LANES; i++)
		while (!ld(&x.map[i]->q->takers.summary))
			sched_yield();
	publish(&x, 1, 1);
	publish(&x, 2, 1);
	while (ld(&x.map[1]->q->ready_head) != 1 || ld(&x.map[2]->q->ready_head) != 1)
		sched_yield();
	kill(pid, SIGKILL);
	EQUAL(waitpid(pid, &status, 0), pid);
	bell = bell_of(&x);
	CHECK(bell != SHMQ_NONE);
	EQUAL(world_reap(x.w, x.w->supervisor, &returned), 1);
	EQUAL(returned, 2);
	for (uint32_t i = 0; i < LANES; i++)
		EQUAL(ld(&x.map[i]->q->takers.summary), 0);
	EQUAL(bell_of(&x), SHMQ_NONE);
	EQUAL(ld(&x.b->waiters[bell].names), 0);
	teardown(x);
}

/* ---- many threads --------------------------------------------------------------------------- */

typedef struct crowd {
	stage *x;
	_Atomic uint32_t taken;
	uint32_t total;
	uint32_t lanes; /* of the present thread: so many, or one without lanes */
} crowd;

static void *lanes_taker(void *argument)
{
	static const uint32_t one = 1;
	crowd *all = argument;
	stage *x = all->x;
	shmq_broker *b = world_attach(x->w, SHMQ_AS_CLIENT);
	shmq_consumer *c[LANES], **from;
	shmq_message m[4];
	shmq_lanes *l;
	uint32_t got;
	void *tag;

	EQUAL(shmq_lanes_open(b, false, false, &one, 1, 8, &l), 0);
	for (uint32_t i = 0; i < LANES; i++) {
		EQUAL(shmq_broker_map(b, x->queue[i], x->serial[i], x->w->queues[x->serial[i]]), 0);
		EQUAL(shmq_consumer_open(b, x->queue[i], x->serial[i], 8, 0, soon(), &c[i]), 0);
		EQUAL(shmq_lanes_add(l, c[i], 0, &c[i]), 0);
	}
	while (ld(&all->taken) < all->total) {
		int r = shmq_lanes_take(l, m, 1, soon(), &got, &tag);

		if (r == SHMQ_EMPTY) {
			EQUAL(shmq_lanes_wait(l, soon()), 0);
			continue;
		}
		EQUAL(r, 0);
		from = tag;
		EQUAL(shmq_finish(*from, m, got, NULL, soon()), 0);
		if (atomic_fetch_add(&all->taken, got) + got >= all->total)
			break;
	}
	for (uint32_t i = 0; i < LANES; i++)
		wait_wake(b, &x->map[i]->q->takers, WAKE_ALL);
	shmq_lanes_close(l);
	shmq_lanes_free(l);
	for (uint32_t i = 0; i < LANES; i++) {
		EQUAL(shmq_consumer_close(c[i], soon()), 0);
		shmq_consumer_free(c[i]);
	}
	EQUAL(shmq_broker_detach(b, soon()), 0);
	shmq_broker_close(b);
	return NULL;
}

static void *plain_taker(void *argument)
{
	crowd *all = argument;
	stage *x = all->x;
	shmq_broker *b = world_attach(x->w, SHMQ_AS_CLIENT);
	shmq_consumer *c;
	shmq_message m;
	uint32_t got;

	EQUAL(shmq_broker_map(b, x->queue[1], x->serial[1], x->w->queues[x->serial[1]]), 0);
	EQUAL(shmq_consumer_open(b, x->queue[1], x->serial[1], 8, 0, soon(), &c), 0);
	while (ld(&all->taken) < all->total) {
		int r = shmq_take(c, &m, 1, soon(), &got);

		if (r == SHMQ_EMPTY) {
			r = shmq_consumer_wait(c, soon());
			CHECK(r == 0);
			continue;
		}
		EQUAL(r, 0);
		EQUAL(shmq_finish(c, &m, 1, NULL, soon()), 0);
		atomic_fetch_add(&all->taken, 1);
	}
	for (uint32_t i = 0; i < LANES; i++)
		wait_wake(b, &x->map[i]->q->takers, WAKE_ALL);
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
	EQUAL(shmq_broker_detach(b, soon()), 0);
	shmq_broker_close(b);
	return NULL;
}

/* A consumer that lost a ring would sleep for 1 s each time, thousands of seconds in all. Nothing
 * is asserted about time. */
static void nothing_published_is_left_lying(void)
{
	stage x = setup();
	crowd all = {.x = &x, .total = 6000};
	pthread_t threads[3];

	EQUAL(pthread_create(&threads[0], NULL, lanes_taker, &all), 0);
	EQUAL(pthread_create(&threads[1], NULL, plain_taker, &all), 0);
	EQUAL(pthread_create(&threads[2], NULL, lanes_taker, &all), 0);
	for (uint32_t i = 0; i < all.total; i++) {
		int r;

		while ((r = world_publish(x.w, x.b, x.p[i * 7 % LANES], "x")) == SHMQ_FULL)
			(void)shmq_producer_wait(x.p[i * 7 % LANES], soon());
		EQUAL(r, 0);
		if (i % 97 == 0)
			while (ld(&all.taken) < i)
				sched_yield(); /* let them all fall asleep now and then */
	}
	for (int i = 0; i < 3; i++)
		EQUAL(pthread_join(threads[i], NULL), 0);
	EQUAL(ld(&all.taken), all.total);
	teardown(x);
}

/* Several threads of one process share a consumer: one is on the doorbell, the others behind it. */
typedef struct team {
	stage *x;
	_Atomic uint32_t taken, ended;
} team;

static void *member(void *argument)
{
	team *t = argument;
	shmq_consumer **from;
	shmq_message m;
	uint32_t got;
	void *tag;

	for (;;) {
		int r = shmq_lanes_take(t->x->l, &m, 1, soon(), &got, &tag);

		if (r == SHMQ_CLOSED)
			break;
		if (r == SHMQ_EMPTY) {
			r = shmq_lanes_wait(t->x->l, soon());
			CHECK(r == 0 || r == SHMQ_CLOSED);
			continue;
		}
		EQUAL(r, 0);
		from = tag;
		EQUAL(shmq_finish(*from, &m, 1, NULL, soon()), 0);
		shmq_lanes_settled(t->x->l);
		atomic_fetch_add(&t->taken, 1);
	}
	atomic_fetch_add(&t->ended, 1);
	return NULL;
}

static void threads_share_a_consumer_and_a_close_ends_them(void)
{
	static const uint32_t one = 1, level[LANES] = {0, 0, 0, 0};
	stage x = setup();
	team t = {.x = &x};
	pthread_t threads[4];

	open_lanes(&x, false, &one, 1, 2, level, LANES);
	for (int i = 0; i < 4; i++)
		EQUAL(pthread_create(&threads[i], NULL, member, &t), 0);
	for (uint32_t i = 0; i < 2000; i++) {
		publish(&x, i % LANES, 1);
		if (i % 50 == 0)
			while (ld(&t.taken) < i)
				sched_yield();
	}
	while (ld(&t.taken) < 2000)
		sched_yield();
	shmq_lanes_close(x.l);
	for (int i = 0; i < 4; i++)
		EQUAL(pthread_join(threads[i], NULL), 0);
	EQUAL(ld(&t.ended), 4);
	EQUAL(bell_of(&x), SHMQ_NONE);
	shmq_lanes_free(x.l);
	teardown(x);
}

int main(void)
{
	a_waker_tells_which_queue_it_was();
	a_busy_consumer_of_many_keeps_no_ring();
	who_slept_owes_a_ring_to_the_lanes_it_leaves();
	beyond_the_table_it_polls();
	the_dead_leave_no_bit_and_a_plain_bell();
	nothing_published_is_left_lying();
	threads_share_a_consumer_and_a_close_ends_them();
	return 0;
}
