/* Robust locks: a death is noticed by exactly one, a stopped holder is waited for. */
#include "base/libc.h"
#include "harness.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>

static shmq_lock_desc *lock;

static pid_t holder(bool stop)
{
	pid_t pid = fork();

	if (!pid) {
		EQUAL(lock_take(lock, soon()), 0);
		raise(stop ? SIGSTOP : SIGKILL);
		lock_drop(lock);
		_exit(0);
	}
	return pid;
}

static void a_held_lock_is_refused_at_once_or_at_its_time(void)
{
	pid_t pid = holder(true);
	int status;

	EQUAL(waitpid(pid, &status, WUNTRACED), pid);
	CHECK(WIFSTOPPED(status));
	EQUAL(lock_take(lock, 0), SHMQ_AGAIN);
	EQUAL(lock_take(lock, 1), SHMQ_AGAIN); /* a time long past */
	EQUAL(lock_take(lock, shmq_now() + NS_PER_MS), SHMQ_AGAIN);
	for (int i = 0; i < 50; i++)
		EQUAL(lock_take(lock, shmq_now() + NS_PER_MS), SHMQ_AGAIN); /* never robbed */
	EQUAL(kill(pid, SIGCONT), 0);
	EQUAL(lock_take(lock, soon()), 0); /* given back in order: no death to repair */
	lock_drop(lock);
	EQUAL(waitpid(pid, &status, 0), pid);
	CHECK(WIFEXITED(status) && !WEXITSTATUS(status));
}

static void a_death_is_told_to_the_next_until_it_is_repaired(void)
{
	int status;
	pid_t pid = holder(false);

	EQUAL(waitpid(pid, &status, 0), pid);
	EQUAL(lock_take(lock, 0), SHMQ_LOCK_DIED);
	EQUAL(lock_take(lock, 0), SHMQ_AGAIN); /* and it is held now */
	lock_consistent(lock);
	lock_drop(lock);
	EQUAL(lock_take(lock, 0), 0);
	lock_drop(lock);
}

static void the_repairer_may_die_as_well(void)
{
	int status;
	pid_t pid = holder(false);

	EQUAL(waitpid(pid, &status, 0), pid);
	for (int i = 0; i < 5; i++) {
		pid = fork();
		if (!pid) {
			EQUAL(lock_take(lock, soon()), SHMQ_LOCK_DIED);
			if (i % 2)
				lock_consistent(lock); /* noted, and dead before it was given back */
			raise(SIGKILL);
		}
		EQUAL(waitpid(pid, &status, 0), pid);
		CHECK(WIFSIGNALED(status));
	}
	EQUAL(lock_take(lock, 0), SHMQ_LOCK_DIED);
	lock_consistent(lock);
	lock_drop(lock);
}

static void a_waiter_learns_of_a_death_while_it_waits(void)
{
	int status;
	pid_t pid = holder(true);

	EQUAL(waitpid(pid, &status, WUNTRACED), pid);
	for (int i = 0; i < 2; i++) { /* two waiters: one repairs, the other finds it repaired */
		if (!fork()) {
			int r = lock_take(lock, soon());

			if (r == SHMQ_LOCK_DIED)
				lock_consistent(lock);
			lock_drop(lock);
			_exit(r == SHMQ_LOCK_DIED ? 3 : r == 0 ? 4 : 5);
		}
	}
	EQUAL(kill(pid, SIGKILL), 0);
	for (int died = 0, fine = 0, i = 0; i < 3; i++) {
		CHECK(wait(&status) > 0);
		if (WIFSIGNALED(status))
			continue;
		died += WEXITSTATUS(status) == 3;
		fine += WEXITSTATUS(status) == 4;
		if (i == 2) {
			EQUAL(died, 1);
			EQUAL(fine, 1);
		}
	}
}

/* A garbage word may name any live thread. Only one whose process maps the lock can hold it. */
static void a_thread_of_a_process_that_does_not_map_the_lock_is_no_holder(void)
{
	char *const program[] = {"sleep", "1000", NULL};
	char *const nothing[] = {NULL};
	pid_t stranger, member = fork();
	int status;

	if (!member)
		for (;;)
			pause();
	EQUAL(posix_spawnp(&stranger, "sleep", NULL, NULL, program, nothing), 0);
	*mutex_holder(&lock->mutex) = (uint32_t)member;
	EQUAL(lock_take(lock, shmq_now() + NS_PER_MS), SHMQ_AGAIN);
	*mutex_holder(&lock->mutex) = (uint32_t)stranger;
	EQUAL(lock_take(lock, 0), SHMQ_AGAIN); /* a try looks at nothing */
	EQUAL(lock_take(lock, shmq_now() + NS_PER_MS), SHMQ_LOCK_DIED);
	lock_consistent(lock);
	lock_drop(lock);
	EQUAL(kill(member, SIGKILL), 0);
	EQUAL(kill(stranger, SIGKILL), 0);
	EQUAL(waitpid(member, &status, 0), member);
	EQUAL(waitpid(stranger, &status, 0), stranger);
}

/* Others read from a lock who holds it. */
static void a_lock_names_its_holder(void)
{
	EQUAL(lock_take(lock, 0), 0);
	EQUAL(*mutex_holder(&lock->mutex), thread_id());
	CHECK(lock_drop(lock));
	EQUAL(*mutex_holder(&lock->mutex), 0);
#ifndef __SANITIZE_THREAD__ /* it reports the unlock of a lock that is not held, as it should */
	CHECK(!lock_drop(lock));
#endif
}

/* A C library links the locks of a thread through the locks themselves. A child holds none of its
 * parent's, so what it locks is linked to none of them. */
static void a_lock_of_a_child_leaves_those_of_its_parent_alone(void)
{
	shmq_lock_desc *other = lock + 1, before;
	int status;
	pid_t pid;

	EQUAL(lock_init(other), 0);
	EQUAL(lock_take(lock, 0), 0);
	memcpy(&before, lock, sizeof(before));
	pid = fork();
	if (!pid) {
		EQUAL(lock_take(other, 0), 0);
		raise(SIGKILL);
	}
	EQUAL(waitpid(pid, &status, 0), pid);
	EQUAL(memcmp(&before, lock, sizeof(before)), 0);
	CHECK(lock_drop(lock));
	EQUAL(lock_take(other, 0), SHMQ_LOCK_DIED);
	lock_consistent(other);
	lock_drop(other);
}

static void *take_and_end(void *unused)
{
	EQUAL(lock_take(lock, soon()), 0);
	return unused;
}

static void a_thread_that_ends_is_a_death_too(void)
{
	pthread_t thread;

	EQUAL(pthread_create(&thread, NULL, take_and_end, NULL), 0);
	EQUAL(pthread_join(thread, NULL), 0);
	EQUAL(lock_take(lock, 0), SHMQ_LOCK_DIED);
	lock_consistent(lock);
	lock_drop(lock);
}

static void take_and_drop(shmq_lock_desc *of, int64_t until)
{
	int r = lock_take(of, until);

	CHECK(r == 0 || r == SHMQ_LOCK_DIED);
	if (r)
		lock_consistent(of);
	lock_drop(of);
}

/* A lock that nobody holds can be taken with any garbage in it; it excludes and is given back. */
static void garbage_in_a_lock_is_mended(void)
{
	static const uint32_t values[] = {0,          1,          0x3fffffff, 0x40000000, 0x5a5a5a5a,
	                                  0x7ffffffe, 0x7fffffff, 0x80000000, 0xa5a5a5a5, 0xffffffff};
	uint32_t words = sizeof(pthread_mutex_t) / 4;
	static shmq_lock_desc garbage;

	for (uint32_t i = 0; i <= words; i++)
		for (uint32_t v = 0; v < sizeof(values) / sizeof(values[0]); v++) {
			EQUAL(lock_init(&garbage), 0);
			for (uint32_t k = 0; k < words; k++) /* one of them, or all */
				if (i == k || i == words)
					memcpy((uint8_t *)&garbage + 4 * k, &values[v], 4);
			if ((i == SHMQ_LOCK_HOLDER / 4 || i == words) && values[v] == 1)
				continue; /* held by a process that is there */
			take_and_drop(&garbage, shmq_now() + NS_PER_MS);
			take_and_drop(&garbage, 0);
		}
	EQUAL(lock_take(&garbage, 0), 0);
	EQUAL(lock_take(&garbage, shmq_now() + NS_PER_MS), SHMQ_AGAIN);
	lock_drop(&garbage);
}

/* A wait for a semaphore with any garbage in it ends at its time, with or without a ring. */
static void garbage_in_a_semaphore_ends_no_waiter(void)
{
	static const uint32_t values[] = {0,          1,          0x3fffffff, 0x40000000, 0x5a5a5a5a,
	                                  0x7fffffff, 0x80000000, 0xa5a5a5a5, 0xffffffff};
	uint32_t words = sizeof(sem_t) / 4;
	sem_t sem;

	for (uint32_t i = 0; i <= words; i++)
		for (uint32_t v = 0; v < sizeof(values) / sizeof(values[0]); v++) {
			EQUAL(sem_init(&sem, 1, 0), 0);
			for (uint32_t k = 0; k < words; k++) /* one of them, or all */
				if (i == k || i == words)
					memcpy((uint8_t *)&sem + 4 * k, &values[v], 4);
			(void)sem_wait_until(&sem, shmq_now() + NS_PER_MS / 10);
			(void)sem_wait_by_realtime(&sem, shmq_now() + NS_PER_MS / 10);
			sem_post(&sem);
		}
}

/* A stopped holder of a publish lock, a deliver lock or the registry lock: the others wait and say
 * so, and nothing is repaired. */
static void a_stopped_client_is_waited_for(void)
{
	world *w = world_start(small_limits(300, 300));
	uint32_t generation, topic = world_topic(w, "t", &generation), queue, found, expired, due;
	uint64_t serial, id;
	shmq_broker *b;
	shmq_producer *p;
	shmq_consumer *c;
	shmq_body body = {"x", 1};
	shmq_message m;
	shmq_dead dead[4];
	int status;
	pid_t pid;

	queue = world_queue(w, topic, "c", &serial);
	b = world_attach(w, SHMQ_AS_CLIENT);
	EQUAL(shmq_producer_open(b, topic, generation, &p), 0);
	c = world_consumer(w, b, queue, serial, 10);
	EQUAL(world_publish(w, b, p, "first"), 0);
	pid = fork();
	if (!pid) {
		shmq_broker *mine = world_attach(w, SHMQ_AS_CLIENT);
		shmq_consumer *taker = world_consumer(w, mine, queue, serial, 10);

		EQUAL(shmq_take(taker, &m, 1, soon(), &found), 0);
		EQUAL(lock_take(&mine->d->registry, soon()), 0);
		EQUAL(lock_take(&mine->topics[topic].publish, soon()), 0);
		EQUAL(lock_take(&ld(&mine->maps[queue])->q->deliver, soon()), 0);
		raise(SIGSTOP);
		lock_drop(&ld(&mine->maps[queue])->q->deliver);
		lock_drop(&mine->topics[topic].publish);
		lock_drop(&mine->d->registry);
		EQUAL(shmq_finish(taker, &m, 1, NULL, soon()), 0); /* still its own */
		EQUAL(shmq_broker_detach(mine, soon()), 0);
		_exit(0);
	}
	EQUAL(waitpid(pid, &status, WUNTRACED), pid);
	CHECK(WIFSTOPPED(status));
	for (int i = 0; i < 3; i++) {
		int64_t until = i ? shmq_now() + 5 * NS_PER_MS : 0;

		EQUAL(shmq_publish(p, &body, 1, 0, until, &id), SHMQ_AGAIN);
		EQUAL(shmq_take(c, &m, 1, until, &found), SHMQ_AGAIN);
		EQUAL(shmq_expire(w->supervisor, queue, &(shmq_expiry){.now = shmq_now(), .limit = 10},
		                  until, &expired, &due),
		      SHMQ_AGAIN);
		EQUAL(shmq_rebuild(w->supervisor, queue, until), SHMQ_AGAIN);
		EQUAL(shmq_queue_empty(b, queue, serial, until, &id), SHMQ_AGAIN);
		EQUAL(shmq_reap_scan(w->supervisor, dead, 4, &found), 0);
		EQUAL(found, 0);
	}
	EQUAL(kill(pid, SIGCONT), 0);
	EQUAL(waitpid(pid, &status, 0), pid);
	CHECK(WIFEXITED(status) && !WEXITSTATUS(status));
	EQUAL(ld(&w->supervisor->d->rebuilt), 0);
	EQUAL(shmq_take(c, &m, 1, soon(), &found), SHMQ_EMPTY);
	SOUND(w);
	world_leave(w, b, p, c);
	world_stop(w);
}

/* The wait of a process whose C library cannot wait against CLOCK_MONOTONIC. */
static void a_wait_by_the_other_clock_ends_at_its_time_or_with_the_lock(void)
{
	pid_t pid = holder(true);
	int64_t until;
	int status;
	sem_t sem;

	EQUAL(waitpid(pid, &status, WUNTRACED), pid);
	until = shmq_now() + 2 * NS_PER_MS;
	EQUAL(mutex_lock_by_realtime(&lock->mutex, until), ETIMEDOUT);
	CHECK(shmq_now() >= until);
	EQUAL(kill(pid, SIGKILL), 0);
#ifndef __SANITIZE_THREAD__ /* it does not see that pthread_mutex_timedlock takes a dead one's lock */
	EQUAL(mutex_lock_by_realtime(&lock->mutex, soon()), EOWNERDEAD);
	lock_consistent(lock);
	lock_drop(lock);
#endif
	EQUAL(waitpid(pid, &status, 0), pid);

	EQUAL(sem_init(&sem, 0, 0), 0);
	until = shmq_now() + 120 * NS_PER_MS; /* more than one slice */
	EQUAL(sem_wait_by_realtime(&sem, until), -1);
	EQUAL(errno, ETIMEDOUT);
	CHECK(shmq_now() >= until);
	EQUAL(sem_post(&sem), 0);
	EQUAL(sem_wait_by_realtime(&sem, until), 0); /* a time long past: as sem_clockwait */
	sem_destroy(&sem);
}

int main(void)
{
	lock = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(lock != MAP_FAILED);
	EQUAL(lock_init(lock), 0);
	a_held_lock_is_refused_at_once_or_at_its_time();
	a_death_is_told_to_the_next_until_it_is_repaired();
	the_repairer_may_die_as_well();
	a_waiter_learns_of_a_death_while_it_waits();
	a_thread_that_ends_is_a_death_too();
	a_lock_names_its_holder();
	a_lock_of_a_child_leaves_those_of_its_parent_alone();
	a_thread_of_a_process_that_does_not_map_the_lock_is_no_holder();
	garbage_in_a_lock_is_mended();
	garbage_in_a_semaphore_ends_no_waiter();
	a_stopped_client_is_waited_for();
	a_wait_by_the_other_clock_ends_at_its_time_or_with_the_lock();
	munmap(lock, 4096);
	return 0;
}
