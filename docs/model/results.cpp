// M7: a store of results. One bucket is a list of entries; the word that names an entry (the bucket's head, or the
// `next` of the entry before it) decides. The free list is derived. A reader takes no lock.
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
#ifndef RECHECK // 1: a reader compares the entry's generation after it has copied
#define RECHECK 1
#endif
#ifndef ADDLOCK // 1: `add` looks and stores under one hold of the lock
#define ADDLOCK 1
#endif
#ifndef WAITORDER // 0: a waiter sets its bit, then looks; 1: looks first
#define WAITORDER 0
#endif
enum { L = 0 }; // the store's lock
enum { W1 = 0, W2 = 1, READER = 2, WAITER = 3, REAP = 4 };
struct Md {
	enum { NP = 5 };
	struct S {
		Pr pr[5];
		i8 kills, lk[4], bad[4], dirty, head;
		i8 key[NE], lo[NE], hi[NE], next[NE],
				gen[NE]; // a value is two words, so that it can be torn
		i8 fr[NE], nfr;
		i8 bit, sem, slp, dead, sets[2], added, seen, last, returned;
	};
	static const char *name(int i)
	{
		static const char *n[] = {"set", "add", "get", "wait", "reap"};
		return n[i];
	}
	static void init(S &s)
	{
		s.kills = KILLS;
		s.head = -1;
		for (int i = 0; i < NE; i++) {
			s.next[i] = -1;
			s.fr[s.nfr++] = i;
		}
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
	static bool listed(S &s, int e)
	{
		for (int at = s.head, n = 0; at >= 0 && n < NE; at = s.next[at], n++)
			if (at == e)
				return true;
		return false;
	}
	static void freed(S &s, int e)
	{
		for (int i = 0; i < s.nfr; i++)
			if (s.fr[i] == e)
				FAILX("an entry is twice in the free list");
		if (listed(s, e))
			FAILX("a listed entry is free");
		s.fr[s.nfr++] = e;
	}
	static int lock(S &s, int me, int d)
	{
		Pr &p = s.pr[me];
		BEGIN(d) LOCK(L);
		if (s.bad[L] || s.dirty) {
			ST(s.dirty = 1);
			ST(s.bad[L] = 0);
			ST(s.nfr = 0; memset(s.fr, 0, sizeof s.fr);
			   for (int i = 0; i < NE; i++) if (!listed(s, i)) {
				   s.gen[i]++;
				   freed(s, i);
			   });
			ST(s.dirty = 0);
		}
		END
	}
	static int find(S &s, int key)
	{
		for (int at = s.head, n = 0; at >= 0 && n < NE; at = s.next[at], n++)
			if (s.key[at] == key)
				return at;
		return -1;
	}
	static int before(S &s, int e)
	{
		for (int at = s.head, n = 0; at >= 0 && n < NE; at = s.next[at], n++)
			if (s.next[at] == e)
				return at;
		return -1;
	}
#define E p.v[0]
#define OLD p.v[1]
#define V p.v[2]
	// Stores value V under key 1 (writer 1 always, writer 2 only if there is none).
	static int writer(S &s, int me)
	{
		Pr &p = s.pr[me];
		BEGIN(0)
		while (s.sets[me] < SETS) {
			ST(s.sets[me]++; V = me * SETS + s.sets[me]);
			if (me == W2 && !ADDLOCK) {
				STEP;
				p.v[5] = find(s, 1) >= 0;
			}
			CALL(lock(s, me, 1));
			OLD = find(s, 1);
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
				ST(s.fr[s.nfr - 1] = 0; s.nfr--);
				ST(s.key[E] = 1);
				ST(s.lo[E] = V);
				ST(s.hi[E] = V);
				ST(s.next[E] = OLD >= 0 ? s.next[OLD] : s.head);
				p.v[3] = OLD >= 0 ? before(s, OLD) : -1;
				ST(if (p.v[3] >= 0) s.next[p.v[3]] = E; else s.head = E); // the commit
				if (OLD >= 0) {
					ST(s.gen[OLD]++);
					ST(freed(s, OLD));
				}
			}
			UNLOCK(L);
			ST(p.v[4] = s.bit; s.bit = 0);
			if (p.v[4])
				ST(s.sem++);
			E = OLD = V = p.v[3] = p.v[4] = p.v[5] = 0;
		}
		WAITFOR(false);
		END
	}
	static int reader(S &s, int me)
	{
		Pr &p = s.pr[me];
		BEGIN(0)
		for (;;) {
			WAITFOR(s.head >= 0 && s.seen < 2);
			E = find(s, 1);
			if (E < 0)
				continue;
			p.v[1] = s.gen[E];
			STEP;
			p.v[2] = s.lo[E];
			STEP;
			p.v[3] = s.hi[E];
			STEP;
			if (RECHECK && (s.gen[E] != p.v[1] || !listed(s, E))) {
				E = p.v[1] = p.v[2] = p.v[3] = 0;
				continue;
			}
			if (p.v[2] != p.v[3])
				FAILX("a torn value was read");
			s.seen++;
			E = p.v[1] = p.v[2] = p.v[3] = 0;
		}
		END
	}
	static int waiter(S &s, int me)
	{
		Pr &p = s.pr[me];
		BEGIN(0)
		for (;;) {
			if (WAITORDER == 1) {
				STEP;
				if (find(s, 1) >= 0)
					break;
			}
			ST(s.bit = 1);
			STEP;
			if (WAITORDER == 0 && find(s, 1) >= 0)
				break;
			ST(s.slp = 1);
			WAITFOR(s.sem > 0);
			ST(s.sem--; s.slp = 0);
		}
		ST(s.returned = 1; s.bit = 0);
		WAITFOR(false);
		END
	}
	static int reap(S &s, int me)
	{
		Pr &p = s.pr[me];
		BEGIN(0)
		for (;;) {
			WAITFOR(s.dead);
			ST(s.dead = 0);
			CALL(lock(s, me, 1));
			UNLOCK(L);
			ST(s.bit = 0);
			ST(s.sem++); // whatever the bit says
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
		int n = 0;
		for (int at = s.head; at >= 0; at = s.next[at])
			if (++n > 1) {
				FAILX("a key is there twice");
				return;
			}
		if (s.last && s.head < 0)
			FAILX("a value that was set is gone");
		s.last = s.head >= 0;
		if (s.head >= 0 && !INPLACE && s.lo[s.head] != s.hi[s.head])
			FAILX("half a value is named");
	}
	static void terminal(S &s)
	{
		if (s.lk[L] || s.bad[L] && !s.dead)
			FAILX("a lock is left");
		if (s.head >= 0 && s.slp)
			FAILX("a waiter sleeps although the key is there");
		if (!s.bad[L] && !s.dirty && s.nfr + (s.head >= 0) != NE)
			FAILX("an entry leaked");
	}
	static void dump(S &s)
	{
		printf("  end: head=%d free=%d bit=%d sem=%d slp=%d\n", s.head, s.nfr, s.bit, s.sem, s.slp);
	}
};
int main()
{
	char t[300];
	snprintf(t, 300, "M7 NE=%d SETS=%d KILLS=%d INPLACE=%d RECHECK=%d ADDLOCK=%d WAITORDER=%d", NE,
	         SETS, KILLS, INPLACE, RECHECK, ADDLOCK, WAITORDER);
	return mc<Md>(t);
}
