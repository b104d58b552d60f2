/* Waiting and waking: no ring is lost, and a thread that leaves keeps none. */
#include "consume/waiter.h"
#include "one_queue.h"

#include <pthread.h>
#include <signal.h>

static bool rung(stage *x, uint32_t bell)
{
	return !sem_trywait(&x->b->waiters[bell].bell);
}

static bool announced(stage *x, uint32_t bell)
{
	return ld(&x->q->takers.words[bell / 64]) >> bell % 64 & 1;
}

/* Bits and summary over the whole table: every waiter is found, in rotation, once. */
static void waiters_are_woken_in_rotation_and_once(void)
{
	stage x = stage_open(small_limits(1000, 1000), "c");
	static const uint32_t bells[] = {1, 63, 64, 700, 1023};
	uint32_t n = 5, woken[5] = {0};

	for (int round = 0; round < 20; round++) {
		for (uint32_t i = 0; i < n; i++)
			wait_announce(&x.q->takers, bells[i]);
		for (uint32_t k = 1; k <= n; k++) {
			uint32_t so_far = 0;

			wait_wake(x.b, &x.q->takers, 1);
			for (uint32_t i = 0; i < n; i++) {
				bool r = rung(&x, bells[i]);

				woken[i] += r;
				EQUAL(r && announced(&x, bells[i]), 0);
				so_far += !announced(&x, bells[i]);
			}
			EQUAL(so_far, k);
		}
		EQUAL(ld(&x.q->takers.summary), 0);
		wait_wake(x.b, &x.q->takers, WAKE_ALL); /* nobody left: nothing happens */
	}
	for (uint32_t i = 0; i < n; i++)
		EQUAL(woken[i], 20);
	for (uint32_t i = 0; i < n; i++)
		wait_announce(&x.q->takers, bells[i]);
	for (uint32_t i = 0; i < n; i++)
		wait_withdraw(&x.q->takers, bells[i]);
	EQUAL(ld(&x.q->takers.summary), 0);
	stage_close(x);
}

typedef struct crowd {
	stage *x;
	uint32_t each;
	_Atomic uint32_t taken;
	uint32_t total;
	uint32_t at_once;
} crowd;

static void *taker(void *argument)
{
	crowd *all = argument;
	shmq_broker *b = world_attach(all->x->w, SHMQ_AS_CLIENT);
	shmq_consumer *c;
	shmq_message m[8];
	uint32_t got;

	EQUAL(shmq_broker_map(b, all->x->queue, all->x->serial, all->x->w->queues[all->x->serial]), 0);
	EQUAL(shmq_consumer_open(b, all->x->queue, all->x->serial, 100, 0, soon(), &c), 0);
	while (ld(&all->taken) < all->total) {
		int r = shmq_take(c, m, all->at_once, soon(), &got);

		if (r == SHMQ_EMPTY) {
			r = shmq_consumer_wait(c, soon());
			CHECK(r == 0);
			continue;
		}
		EQUAL(r, 0);
		EQUAL(shmq_finish(c, m, got, NULL, soon()), 0);
		/* The last one in lets everybody out. */
		if (atomic_fetch_add(&all->taken, got) + got >= all->total)
			wait_wake(b, &all->x->q->takers, WAKE_ALL);
	}
	wait_wake(b, &all->x->q->takers, WAKE_ALL);
	EQUAL(shmq_consumer_close(c, soon()), 0);
	shmq_consumer_free(c);
	EQUAL(shmq_broker_detach(b, soon()), 0);
	shmq_broker_close(b);
	return NULL;
}

/* A waiter that lost a ring would sleep for 1 s each time, thousands of seconds in all. Nothing is
 * asserted about time. */
static void nothing_published_is_left_lying_with_two_waiters(void)
{
	stage x = stage_open(small_limits(1000, 1000), "c");
	crowd all = {.x = &x, .total = 6000, .at_once = 1};
	pthread_t threads[2];

	for (int i = 0; i < 2; i++)
		EQUAL(pthread_create(&threads[i], NULL, taker, &all), 0);
	for (uint32_t i = 0; i < all.total;) {
		shmq_body two[2] = {{"x", 1}, {"y", 1}};
		uint64_t id;
		int r = MAPPED(x.w, x.b, shmq_publish(x.p, two, 1 + i % 2, 0, soon(), &id));

		if (r == SHMQ_FULL) {
			r = shmq_producer_wait(x.p, soon());
			CHECK(r == 0);
			continue;
		}
		EQUAL(r, 0);
		i += 1 + i % 2;
		if (i % 97 == 0)
			while (ld(&all.taken) < i && ld(&all.taken) < all.total)
				sched_yield(); /* let them all fall asleep now and then */
	}
	for (int i = 0; i < 2; i++)
		EQUAL(pthread_join(threads[i], NULL), 0);
	stage_close(x);
}

/* One post for two messages: a thread that takes only one passes the post on. */
static void who_takes_less_than_there_is_wakes_the_next(void)
{
	stage x = stage_open(small_limits(1000, 1000), "c");
	shmq_body two[2] = {{"x", 1}, {"y", 1}};
	shmq_message m;
	uint32_t got;
	uint64_t id;

	EQUAL(MAPPED(x.w, x.b, shmq_publish(x.p, two, 2, 0, soon(), &id)), 0);
	wait_announce(&x.q->takers, 500); /* came late: the publisher did not see it */
	EQUAL(shmq_take(x.c, &m, 1, soon(), &got), 0);
	CHECK(rung(&x, 500));
	wait_announce(&x.q->takers, 500);
	EQUAL(shmq_take(x.c, &m, 1, soon(), &got), 0);
	CHECK(!rung(&x, 500)); /* nothing is left to wake for */
	wait_withdraw(&x.q->takers, 500);
	stage_close(x);
}

static void who_closes_and_leaves_messages_wakes_the_next(void)
{
	stage x = stage_open(small_limits(1000, 1000), "c");
	shmq_consumer *c = world_consumer(x.w, x.b, x.queue, x.serial, 10);
	shmq_message m;
	uint32_t got;

	EQUAL(world_publish(x.w, x.b, x.p, "x"), 0);
	EQUAL(shmq_take(c, &m, 1, soon(), &got), 0);
	wait_announce(&x.q->takers, 500);
	EQUAL(shmq_consumer_close(c, soon()), 0);
	CHECK(rung(&x, 500));
	shmq_consumer_free(c);
	stage_close(x);
}

static void *late_publisher(void *argument)
{
	stage *x = argument;

	while (!ld(&x->q->takers.summary))
		sched_yield(); /* somebody waits now */
	EQUAL(world_publish(x->w, x->b, x->p, "x"), 0);
	return NULL;
}

static void a_waiter_is_rung_by_publish(void)
{
	for (int i = 0; i < 200; i++) {
		static stage x;
		pthread_t thread;
		shmq_message m;
		uint32_t got;

		if (!i)
			x = stage_open(small_limits(1000, 1000), "c");
		EQUAL(pthread_create(&thread, NULL, late_publisher, &x), 0);
		while (shmq_take(x.c, &m, 1, soon(), &got) == SHMQ_EMPTY)
			EQUAL(shmq_consumer_wait(x.c, soon()), 0);
		EQUAL(shmq_finish(x.c, &m, 1, NULL, soon()), 0);
		EQUAL(pthread_join(thread, NULL), 0);
		if (i == 199)
			stage_close(x);
	}
}

static void on_signal(int number)
{
	(void)number;
}

static pthread_t sleeper;
static _Atomic int over;

static void *interrupter(void *argument)
{
	stage *x = argument;

	while (!ld(&x->q->takers.summary))
		sched_yield();
	while (!ld(&over)) { /* until it is seen to have slept */
		pthread_kill(sleeper, SIGUSR1);
		sched_yield();
	}
	return NULL;
}

static void a_signal_interrupts_and_a_deadline_ends_the_wait(void)
{
	stage x = stage_open(small_limits(1000, 1000), "c");
	struct sigaction action = {.sa_handler = on_signal};
	pthread_t thread;

	EQUAL(sigaction(SIGUSR1, &action, NULL), 0);
	EQUAL(shmq_consumer_wait(x.c, shmq_now()), SHMQ_TIMEOUT);
	EQUAL(shmq_consumer_wait(x.c, shmq_now() + 3 * NS_PER_MS), SHMQ_TIMEOUT);
	EQUAL(ld(&x.q->takers.summary), 0);
	sleeper = pthread_self();
	EQUAL(pthread_create(&thread, NULL, interrupter, &x), 0);
	EQUAL(shmq_consumer_wait(x.c, soon()), SHMQ_INTERRUPTED);
	st(&over, 1);
	EQUAL(pthread_join(thread, NULL), 0);
	EQUAL(ld(&x.q->takers.summary), 0);
	stage_close(x);
}

/* Rung and interrupted at once: the ring goes on to the next. */
static void who_leaves_passes_the_ring_on(void)
{
	stage x = stage_open(small_limits(1000, 1000), "c");

	EQUAL(world_publish(x.w, x.b, x.p, "x"), 0);
	st(&world_view(x.w, x.queue)->q->paused, 1); /* as good as empty, so that it waits */
	wait_announce(&x.q->takers, 900);
	st(&x.q->takers.rotor, 0);
	EQUAL(shmq_consumer_wait(x.c, shmq_now()), SHMQ_TIMEOUT);
	CHECK(!rung(&x, 900)); /* nothing to take: no reason to wake anybody */
	EQUAL(shmq_channel_pause(x.b, x.queue, x.serial, false, soon()), 0);
	CHECK(rung(&x, 900));
	stage_close(x);
}

static void *closer(void *argument)
{
	stage *x = argument;

	while (!ld(&x->q->takers.summary))
		sched_yield();
	shmq_consumer_wake(x->c);
	return NULL;
}

static void a_wake_of_one_consumer_ends_its_wait(void)
{
	stage x = stage_open(small_limits(1000, 1000), "c");
	pthread_t thread;

	EQUAL(pthread_create(&thread, NULL, closer, &x), 0);
	EQUAL(shmq_consumer_wait(x.c, soon()), 0);
	EQUAL(pthread_join(thread, NULL), 0);
	stage_close(x);
}

/* 1024 threads wait already: the next one polls, and finds what comes. */
static void beyond_the_table_a_waiter_polls(void)
{
	stage x = stage_open(small_limits(1000, 1000), "c");
	uint32_t bells[SHMQ_WAITERS], n = 0;

	while (!bell_get(x.b, &bells[n]))
		n++;
	EQUAL(n, SHMQ_WAITERS - 1); /* one is the supervisor's */
	EQUAL(ld(&x.b->d->waiters_high), SHMQ_WAITERS);
	EQUAL(shmq_consumer_wait(x.c, soon()), 0);
	EQUAL(shmq_consumer_wait(x.c, shmq_now()), SHMQ_TIMEOUT);
	EQUAL(shmq_producer_wait(x.p, shmq_now()), SHMQ_TIMEOUT);
	while (n)
		bell_put(x.b, bells[--n]);
	EQUAL(bell_get(x.b, &bells[0]), 0);
	bell_put(x.b, bells[0]);
	stage_close(x);
}

/* A death between clearing the waiter's bit and posting: the reaper posts all, set or not. */
static void the_reaper_rings_every_waiter_of_the_dead_ones_queues(void)
{
	stage x = stage_open(small_limits(1000, 1000), "c");
	uint32_t bell, returned;
	int status;
	pid_t pid;

	EQUAL(bell_get(x.b, &bell), 0);
	pid = fork();
	if (!pid) {
		shmq_broker *b = world_attach(x.w, SHMQ_AS_CLIENT);
		shmq_producer *p;

		EQUAL(shmq_producer_open(b, x.topic, x.generation, &p), 0);
		EQUAL(world_publish(x.w, b, p, "x"), 0); /* nobody has announced himself */
		raise(SIGKILL);
	}
	EQUAL(waitpid(pid, &status, 0), pid);
	CHECK(!rung(&x, bell));
	EQUAL(world_reap(x.w, x.w->supervisor, &returned), 1);
	CHECK(rung(&x, bell));
	bell_put(x.b, bell);
	stage_close(x);
}

static void a_dead_waiters_bell_is_new_for_the_next_owner(void)
{
	stage x = stage_open(small_limits(1000, 1000), "c");
	uint32_t before, returned, again;
	int status;
	pid_t pid;

	pid = fork();
	if (!pid) {
		shmq_broker *b = world_attach(x.w, SHMQ_AS_CLIENT);
		uint32_t bell;

		EQUAL(bell_get(b, &bell), 0);
		bell_ring(b, bell);
		(void)world_consumer(x.w, b, x.queue, x.serial, 1);
		wait_announce(&ld(&b->maps[x.queue])->q->takers, bell);
		raise(SIGKILL);
	}
	EQUAL(waitpid(pid, &status, 0), pid);
	before = ld(&x.b->d->waiters_high);
	CHECK(ld(&x.q->takers.summary));
	EQUAL(world_reap(x.w, x.w->supervisor, &returned), 1);
	EQUAL(ld(&x.q->takers.summary), 0);
	EQUAL(bell_get(x.b, &again), 0);
	EQUAL(again + 1, before);
	CHECK(!rung(&x, again));
	bell_put(x.b, again);
	stage_close(x);
}

/* ---- one waiter for many consumers ---- */

typedef struct many {
	stage x;
	uint32_t topic[3], generation[3];
	shmq_producer *p[3];
	shmq_consumer *c[3];
	shmq_waitset_desc *takers[3];
	shmq_waiter *w;
} many;

static void many_setup(many *m)
{
	static const char *const names[] = {"a", "b", "c"};

	m->x = stage_open(small_limits(1000, 1000), "c");
	for (int i = 0; i < 3; i++) {
		uint32_t queue;
		uint64_t serial;

		m->topic[i] = world_topic(m->x.w, names[i], &m->generation[i]);
		queue = world_queue(m->x.w, m->topic[i], "c", &serial);
		EQUAL(shmq_producer_open(m->x.b, m->topic[i], m->generation[i], &m->p[i]), 0);
		m->c[i] = world_consumer(m->x.w, m->x.b, queue, serial, 10);
		m->takers[i] = &world_view(m->x.w, queue)->q->takers;
	}
	EQUAL(shmq_waiter_open(m->x.b, &m->w), 0);
}

static void many_teardown(many *m)
{
	shmq_waiter_close(m->w);
	shmq_waiter_free(m->w);
	for (int i = 0; i < 3; i++) {
		EQUAL(ld(&m->takers[i]->summary), 0);
		EQUAL(shmq_consumer_close(m->c[i], soon()), 0);
		shmq_consumer_free(m->c[i]);
		shmq_producer_close(m->p[i]);
	}
	stage_close(m->x);
}

typedef struct act {
	many *m;
	enum { PUBLISH, WAKE, CLOSE } what;
	int which;
} act;

static void *act_when_it_waits(void *argument)
{
	act *a = argument;

	while (!ld(&a->m->takers[2]->summary)) /* the last it announces itself to */
		sched_yield();
	if (a->what == PUBLISH)
		EQUAL(world_publish(a->m->x.w, a->m->x.b, a->m->p[a->which], "x"), 0);
	else if (a->what == WAKE)
		shmq_waiter_wake(a->m->w);
	else
		EQUAL(shmq_consumer_close(a->m->c[a->which], soon()), 0);
	return NULL;
}

static void one_bell_waits_for_many_consumers(void)
{
	many m;
	uint32_t ready[3], count, got;
	shmq_message message;

	many_setup(&m);
	EQUAL(shmq_waiter_wait(m.w, m.c, 3, 0, ready, &count), SHMQ_TIMEOUT);
	EQUAL(shmq_waiter_wait(m.w, m.c, 3, shmq_now() + 3 * NS_PER_MS, ready, &count), SHMQ_TIMEOUT);
	EQUAL(count, 0);
	for (int i = 0; i < 100; i++) {
		act a = {&m, PUBLISH, i % 3};
		pthread_t thread;
		int r;

		EQUAL(pthread_create(&thread, NULL, act_when_it_waits, &a), 0);
		do
			r = shmq_waiter_wait(m.w, m.c, 3, soon(), ready, &count);
		while (!r && !count);
		EQUAL(r, 0);
		EQUAL(count, 1);
		EQUAL(ready[0], i % 3);
		EQUAL(shmq_take(m.c[i % 3], &message, 1, soon(), &got), 0);
		EQUAL(shmq_finish(m.c[i % 3], &message, 1, NULL, soon()), 0);
		EQUAL(pthread_join(thread, NULL), 0);
	}
	for (int i = 0; i < 3; i++)
		EQUAL(world_publish(m.x.w, m.x.b, m.p[i], "x"), 0);
	EQUAL(shmq_waiter_wait(m.w, m.c, 3, 0, ready, &count), 0);
	EQUAL(count, 3);
	for (uint32_t i = 0; i < 3; i++)
		EQUAL(ready[i], i);
	many_teardown(&m);
}

static void a_wake_ends_the_wait_once_and_a_close_names_its_consumer(void)
{
	many m;
	uint32_t ready[3], count;
	pthread_t thread;
	act wake = {&m, WAKE, 0}, end = {&m, CLOSE, 1};
	int r;

	many_setup(&m);
	shmq_waiter_wake(m.w);
	shmq_waiter_wake(m.w);
	EQUAL(shmq_waiter_wait(m.w, m.c, 3, soon(), ready, &count), 0);
	EQUAL(count, 0);
	EQUAL(shmq_waiter_wait(m.w, m.c, 3, shmq_now() + NS_PER_MS, ready, &count), SHMQ_TIMEOUT);
	EQUAL(pthread_create(&thread, NULL, act_when_it_waits, &wake), 0);
	EQUAL(shmq_waiter_wait(m.w, m.c, 3, soon(), ready, &count), 0);
	EQUAL(count, 0);
	EQUAL(pthread_join(thread, NULL), 0);
	EQUAL(pthread_create(&thread, NULL, act_when_it_waits, &end), 0);
	do
		r = shmq_waiter_wait(m.w, m.c, 3, soon(), ready, &count);
	while (!r && !count);
	EQUAL(r, 0);
	EQUAL(ready[0], 1);
	EQUAL(pthread_join(thread, NULL), 0);
	shmq_waiter_wake(m.w); /* leaves a ring that the next owner of the bell must not see */
	shmq_waiter_close(m.w);
	EQUAL(shmq_waiter_wait(m.w, m.c, 3, soon(), ready, &count), SHMQ_CLOSED);
	shmq_waiter_wake(m.w);
	many_teardown(&m);
}

static void who_was_told_and_takes_nothing_passes_it_on(void)
{
	stage x = stage_open(small_limits(1000, 1000), "c");
	shmq_waiter *w;
	uint32_t ready, count;

	EQUAL(shmq_waiter_open(x.b, &w), 0);
	EQUAL(world_publish(x.w, x.b, x.p, "x"), 0);
	wait_announce(&x.q->takers, 900);
	EQUAL(shmq_waiter_wait(w, &x.c, 1, soon(), &ready, &count), 0);
	EQUAL(count, 1);
	CHECK(!rung(&x, 900));
	shmq_consumer_pass(x.c);
	CHECK(rung(&x, 900));
	shmq_waiter_close(w);
	shmq_waiter_free(w);
	stage_close(x);
}

static void take_all(stage *x)
{
	shmq_message m[4];
	uint32_t got;

	EQUAL(shmq_take(x->c, m, 4, soon(), &got), 0);
	EQUAL(shmq_finish(x->c, m, got, NULL, soon()), 0);
}

/* A thread that publishes may see to the waiter of its own process itself. */
static void a_ring_that_is_caught_posts_nothing(void)
{
	stage x = stage_open(small_limits(1000, 1000), "c");
	uint32_t queues[SHMQ_CAUGHT], bell;
	shmq_waiter *w;

	EQUAL(shmq_waiter_open(x.b, &w), 0);
	bell = waiter_bell(w);
	for (int round = 0; round < 3; round++) {
		CHECK(!shmq_waiter_announce(w, x.c));
		CHECK(announced(&x, bell));
		shmq_waiter_catch(w);
		EQUAL(world_publish(x.w, x.b, x.p, "x"), 0);
		EQUAL(shmq_waiter_caught(queues), 1);
		EQUAL(queues[0], x.queue);
		CHECK(!rung(&x, bell));
		CHECK(!announced(&x, bell));
		CHECK(shmq_waiter_announce(w, x.c)); /* it is there already */
		CHECK(shmq_waiter_withdraw(w, x.c));
		CHECK(!announced(&x, bell));
		take_all(&x);
	}
	CHECK(!shmq_waiter_announce(w, x.c));
	wait_announce(&x.q->takers, 900); /* of another process */
	shmq_waiter_catch(w);
	EQUAL(world_publish(x.w, x.b, x.p, "x"), 0);
	EQUAL(world_publish(x.w, x.b, x.p, "x"), 0);
	EQUAL(shmq_waiter_caught(queues), 1);
	CHECK(rung(&x, 900));
	EQUAL(shmq_waiter_caught(queues), 0);
	take_all(&x);
	CHECK(!shmq_waiter_announce(w, x.c));
	EQUAL(world_publish(x.w, x.b, x.p, "x"), 0);
	CHECK(rung(&x, bell));
	shmq_waiter_close(w);
	CHECK(!shmq_waiter_announce(w, x.c));
	CHECK(!shmq_waiter_withdraw(w, x.c));
	shmq_waiter_free(w);
	stage_close(x);
}

/* 1024 threads wait already, as above; later there is a bell for it. */
static void beyond_the_table_a_waiter_of_many_polls(void)
{
	stage x = stage_open(small_limits(1000, 1000), "c");
	uint32_t bells[SHMQ_WAITERS], n = 0, ready, count;
	shmq_waiter *w;

	while (!bell_get(x.b, &bells[n]))
		n++;
	EQUAL(shmq_waiter_open(x.b, &w), 0);
	EQUAL(shmq_waiter_wait(w, &x.c, 1, shmq_now() + NS_PER_MS, &ready, &count), SHMQ_TIMEOUT);
	EQUAL(shmq_waiter_wait(w, &x.c, 1, soon(), &ready, &count), 0);
	EQUAL(world_publish(x.w, x.b, x.p, "x"), 0);
	EQUAL(shmq_waiter_wait(w, &x.c, 1, soon(), &ready, &count), 0);
	EQUAL(count, 1);
	shmq_waiter_wake(w);
	while (n)
		bell_put(x.b, bells[--n]);
	st(&world_view(x.w, x.queue)->q->paused, 1);
	EQUAL(shmq_waiter_wait(w, &x.c, 1, shmq_now() + NS_PER_MS, &ready, &count), 0);
	EQUAL(shmq_waiter_wait(w, &x.c, 1, shmq_now() + NS_PER_MS, &ready, &count), SHMQ_TIMEOUT);
	shmq_waiter_close(w);
	shmq_waiter_free(w);
	stage_close(x);
}

static void a_dead_waiter_of_many_leaves_no_bit(void)
{
	stage x = stage_open(small_limits(1000, 1000), "c");
	uint32_t returned;
	int status;
	pid_t pid;

	pid = fork();
	if (!pid) {
		shmq_broker *b = world_attach(x.w, SHMQ_AS_CLIENT);
		shmq_consumer *c = world_consumer(x.w, b, x.queue, x.serial, 1);
		shmq_waiter *w;
		uint32_t ready, count;

		EQUAL(shmq_waiter_open(b, &w), 0);
		alarm(60);
		for (;;)
			(void)shmq_waiter_wait(w, &c, 1, soon(), &ready, &count);
	}
	while (!ld(&x.q->takers.summary))
		sched_yield();
	kill(pid, SIGKILL);
	EQUAL(waitpid(pid, &status, 0), pid);
	CHECK(ld(&x.q->takers.summary));
	EQUAL(world_reap(x.w, x.w->supervisor, &returned), 1);
	EQUAL(ld(&x.q->takers.summary), 0);
	stage_close(x);
}

int main(void)
{
	waiters_are_woken_in_rotation_and_once();
	nothing_published_is_left_lying_with_two_waiters();
	who_takes_less_than_there_is_wakes_the_next();
	who_closes_and_leaves_messages_wakes_the_next();
	a_waiter_is_rung_by_publish();
	a_signal_interrupts_and_a_deadline_ends_the_wait();
	who_leaves_passes_the_ring_on();
	a_wake_of_one_consumer_ends_its_wait();
	beyond_the_table_a_waiter_polls();
	the_reaper_rings_every_waiter_of_the_dead_ones_queues();
	a_dead_waiters_bell_is_new_for_the_next_owner();
	one_bell_waits_for_many_consumers();
	a_wake_ends_the_wait_once_and_a_close_names_its_consumer();
	who_was_told_and_takes_nothing_passes_it_on();
	a_ring_that_is_caught_posts_nothing();
	beyond_the_table_a_waiter_of_many_polls();
	a_dead_waiter_of_many_leaves_no_bit();
	return 0;
}
