// M7: a results store, one key of it. An entry's word decides: 0 is free, else it is the number of the set that
// stored it. The index and the free list are derived. Everybody looks under the lock.
#include "mc.h"
#ifndef NE
#define NE 3
#endif
#ifndef SETS // how often each of the two writers stores
#define SETS 2
#endif
#ifndef KILLS
#define KILLS 1
#endif
#ifndef INPLACE // 1: a second value for a key is written over the first
#define INPLACE 0
#endif
#ifndef ORDER // 1: the old entry is freed before the new one counts
#define ORDER 0
#endif
#ifndef READLOCK // 0: a reader takes no lock
#define READLOCK 1
#endif
#ifndef ADDLOCK // 1: `add` looks and stores under one hold of the lock
#define ADDLOCK 1
#endif
#ifndef WAITORDER // 0: a waiter reads the count of sets, then looks; 1: looks first
#define WAITORDER 0
#endif
enum { L = 0 }; // the store's lock
enum { W1 = 0, W2 = 1, READER = 2, WAITER = 3, REAP = 4 };
struct Md {
	enum { NP = 5 };
	struct S {
		Pr pr[5];
		i8 kills, lk[4], bad[4], dirty;
		i8 word[NE], lo[NE], hi[NE]; // a value is two words, so that it can be torn
		i8 number, at;               // the last number given; the index: the key's entry, or -1
		i8 fr[NE], nfr;
		i8 stored; // the count of sets that a waiter compares
		i8 bit, sem, slp, dead, sets[2], seen, last, sure, returned;
	};
	static const char *name(int i)
	{
		static const char *n[] = {"set", "add", "get", "wait", "reap"};
		return n[i];
	}
	static void init(S &s)
	{
		s.kills = KILLS;
		s.at = -1;
		for (int i = 0; i < NE; i++)
			s.fr[s.nfr++] = i;
		for (int i = 0; i < 5; i++)
			s.pr[i].alive = 1;
	}
	static bool kill(S &s, int i)
	{
		Pr &p = s.pr[i];
		if (i > 1 || !p.pc[0])
			return false;
		if (s.lk[L] == i + 1) {
			s.lk[L] = 0;
			s.bad[L] = 1;
		}
		memset(&p, 0, sizeof p);
		p.alive = 1;
		s.dead = 1;
		return true;
	}
	// The entry that counts: the greatest word of all.
	static int truth(S &s)
	{
		int best = -1;
		for (int i = 0; i < NE; i++)
			if (s.word[i] && (best < 0 || s.word[i] > s.word[best]))
				best = i;
		return best;
	}
	static void freed(S &s, int e)
	{
		for (int i = 0; i < s.nfr; i++)
			if (s.fr[i] == e)
				FAILX("an entry is twice in the free list");
		if (s.word[e])
			FAILX("an entry in use is free");
		s.fr[s.nfr++] = e;
	}
	static int lock(S &s, int me, int d)
	{
		Pr &p = s.pr[me];
		BEGIN(d) LOCK(L);
		if (s.bad[L] || s.dirty) {
			ST(s.dirty = 1);
			ST(s.bad[L] = 0);
			ST(s.at = truth(s));
			ST(for (int i = 0; i < NE; i++) if (i != s.at) s.word[i] = 0;);
			ST(s.nfr = 0; memset(s.fr, 0, sizeof s.fr);
			   for (int i = 0; i < NE; i++) if (!s.word[i]) freed(s, i););
			ST(s.stored++);
			ST(s.dirty = 0);
		}
		END
	}
#define E p.v[0]
#define OLD p.v[1]
#define V p.v[2]
	// Stores value V under the key (writer 1 always, writer 2 only if there is none).
	static int writer(S &s, int me)
	{
		Pr &p = s.pr[me];
		BEGIN(0)
		while (s.sets[me] < SETS) {
			ST(s.sets[me]++; V = me * SETS + s.sets[me]);
			if (me == W2 && !ADDLOCK) {
				STEP;
				p.v[5] = s.at >= 0;
			}
			CALL(lock(s, me, 1));
			OLD = s.at;
			if (me == W2 && (ADDLOCK ? OLD >= 0 : p.v[5])) {
				UNLOCK(L);
				continue;
			}
			if (me == W2 && OLD >= 0)
				FAILX("add replaced a value");
			if (INPLACE && OLD >= 0) {
				ST(s.lo[OLD] = V);
				ST(s.hi[OLD] = V);
			} else {
				E = s.fr[s.nfr - 1];
				ST(s.lo[E] = V);
				ST(s.hi[E] = V);
				ST(s.fr[s.nfr - 1] = 0; s.nfr--);
				if (ORDER && OLD >= 0)
					ST(s.word[OLD] = 0);
				ST(s.word[E] = ++s.number); // the commit
				ST(s.at = E);
				if (OLD >= 0) {
					ST(s.word[OLD] = 0);
					ST(freed(s, OLD));
				}
			}
			ST(s.stored++);
			s.sure = INPLACE ? 0 : s.number;
			UNLOCK(L);
			ST(p.v[4] = s.bit; s.bit = 0);
			if (p.v[4])
				ST(s.sem++);
			E = OLD = V = p.v[4] = p.v[5] = 0;
		}
		WAITFOR(false);
		END
	}
	static int reader(S &s, int me)
	{
		Pr &p = s.pr[me];
		BEGIN(0)
		for (;;) {
			WAITFOR(truth(s) >= 0 && s.seen < 2);
			if (READLOCK)
				CALL(lock(s, me, 1));
			E = s.at;
			if (E >= 0) {
				if (s.word[E] < s.sure)
					FAILX("an old value came back");
				STEP;
				p.v[2] = s.lo[E];
				STEP;
				p.v[3] = s.hi[E];
				if (p.v[2] != p.v[3])
					FAILX("a torn value was read");
				s.seen++;
			}
			if (READLOCK)
				UNLOCK(L);
			E = p.v[1] = p.v[2] = p.v[3] = 0;
		}
		END
	}
#define COUNT p.v[5]
	static int waiter(S &s, int me)
	{
		Pr &p = s.pr[me];
		BEGIN(0)
		for (;;) {
			if (WAITORDER == 0) {
				STEP;
				COUNT = s.stored;
			}
			CALL(lock(s, me, 1));
			p.v[1] = s.at >= 0;
			UNLOCK(L);
			if (p.v[1])
				break;
			if (WAITORDER == 1) {
				STEP;
				COUNT = s.stored;
			}
			ST(s.bit = 1);
			STEP;
			if (s.stored != COUNT)
				continue;
			ST(s.slp = 1);
			WAITFOR(s.sem > 0);
			ST(s.sem--; s.slp = 0);
		}
		ST(s.returned = 1; s.bit = 0);
		WAITFOR(false);
		END
	}
	// It rings everybody, whatever the bit says, and leaves the repair to the next locker.
	static int reap(S &s, int me)
	{
		Pr &p = s.pr[me];
		BEGIN(0)
		for (;;) {
			WAITFOR(s.dead);
			ST(s.dead = 0);
			ST(s.bit = 0);
			ST(s.sem++);
		}
		END
	}
	static int step(S &s, int i)
	{
		switch (i) {
		case READER:
			return reader(s, i);
		case WAITER:
			return waiter(s, i);
		case REAP:
			return reap(s, i);
		default:
			return writer(s, i);
		}
	}
	static void inv(S &s)
	{
		int best = truth(s);
		if (s.last && best < 0)
			FAILX("a value that was set is gone");
		s.last = best >= 0;
		if (best >= 0 && !INPLACE && s.lo[best] != s.hi[best])
			FAILX("half a value counts");
	}
	static void terminal(S &s)
	{
		int best = truth(s);
		if (s.lk[L])
			FAILX("a lock is left");
		if (best >= 0 && s.slp)
			FAILX("a waiter sleeps although the key is there");
		if (!s.bad[L] && !s.dirty && s.nfr + (best >= 0) != NE)
			FAILX("an entry leaked");
		if (!s.bad[L] && !s.dirty && s.at != best)
			FAILX("the index names another entry than the one that counts");
	}
	static void dump(S &s)
	{
		printf("  end: at=%d free=%d bit=%d sem=%d slp=%d\n", s.at, s.nfr, s.bit, s.sem, s.slp);
	}
};
int main()
{
	char t[300];
	snprintf(t, 300,
	         "M7 NE=%d SETS=%d KILLS=%d INPLACE=%d ORDER=%d READLOCK=%d ADDLOCK=%d "
	         "WAITORDER=%d",
	         NE, SETS, KILLS, INPLACE, ORDER, READLOCK, ADDLOCK, WAITORDER);
	return mc<Md>(t);
}
