//! Prompts that begin like earlier texts compute what is new, and answer the same.

use std::sync::Arc;
use std::sync::Mutex;

use deltafin::engine::Engine;
use deltafin::engine::Generation;
use deltafin::engine::Prefixes;
use deltafin::engine::Prompt;
use deltafin::engine::Request;
use deltafin::engine::Start;
use deltafin::engine::StateStore;
use deltafin::store::Budget;
use deltafin::terms::TokenId;
use deltafin::text::Conversation;
use deltafin::text::Effort;
use deltafin::text::Message;
use deltafin::text::Role;

use crate::kit::Kit;
use crate::kit::answer;
use crate::kit::greedy;
use crate::kit::ids;
use crate::kit::run;
use crate::kit::sampled;
use crate::kit::tiny;
use crate::kit::trained;

fn keeps(kit: &Kit, bytes: u64) {
    kit.engine.set_prefixes(Prefixes {
        bytes,
        ..Prefixes::default()
    });
}

/// A conversation of some 600 tokens, and its next turn.
fn turns(engine: &Engine, effort: Effort) -> (Request, impl Fn(&Generation) -> Request) {
    let long = "It was a fine morning, and the whole party walked to the village. ".repeat(40);
    let messages = vec![
        Message::text(Role::System, long),
        Message::text(Role::User, "Who are you?"),
    ];
    let ask = move |messages| {
        let conversation = Conversation {
            messages,
            effort,
            ..Conversation::default()
        };
        Request::new(Prompt::Chat(conversation), 16, greedy())
    };
    let first = ask(messages.clone());
    let len = engine.prompt_ids(&first.prompt).unwrap().len();
    assert!((500..900).contains(&len), "{len} tokens");
    let next = move |made: &Generation| {
        let mut messages = messages.clone();
        let mut reply = Message::text(Role::Assistant, made.text.clone());
        reply.reasoning = (!made.reasoning.is_empty()).then(|| made.reasoning.clone());
        messages.push(reply);
        messages.push(Message::text(Role::User, "And what do you like?"));
        ask(messages)
    };
    (first, next)
}

#[test]
fn a_second_turn_computes_the_new_tokens_alone() {
    for effort in [Effort::None, Effort::Max] {
        let fresh = trained();
        let kit = trained();
        keeps(&kit, 1 << 30);
        let (first, next) = turns(&kit.engine, effort);
        let one = run(&kit.engine, &first).0;
        assert_eq!(answer(&one), answer(&run(&fresh.engine, &first).0));
        assert_eq!(one.cached_tokens, 0);
        let second = next(&one);
        let two = run(&kit.engine, &second).0;
        assert_eq!(
            answer(&two),
            answer(&run(&fresh.engine, &second).0),
            "{effort:?}"
        );
        assert_eq!(two.computed_rows + two.cached_tokens, two.prompt_ids.len());
        // All of the first prompt's messages are known; what follows is the reply and the question.
        let stop_ids = kit.engine.stop_ids();
        let messages = |made: &Generation| {
            let end = made.prompt_ids.iter().rposition(|id| stop_ids.contains(id));
            end.unwrap() + 1
        };
        assert!(messages(&one) > 500);
        assert!(two.cached_tokens >= messages(&one), "{}", two.cached_tokens);
        // And the same question again computes the opening of the reply alone.
        let again = run(&kit.engine, &second).0;
        assert_eq!(answer(&again), answer(&two));
        assert_eq!(again.cached_tokens, messages(&two));
        assert_eq!(kit.engine.prefix_stats().hits, 2);
        assert_eq!(
            fresh.engine.prefix_stats().states,
            0,
            "nothing is kept unasked"
        );
    }
}

#[test]
fn texts_that_share_a_beginning_share_its_state_whatever_the_budget() {
    let fresh = tiny(Budget::Unlimited);
    let base = ids(5, 150);
    let ask = |n: u32| {
        let prompt = match n % 3 {
            0 => base.clone(),
            1 => [&base[..], &ids(n, 20)].concat(),
            _ => [&base[..90], &ids(n, 70)].concat(),
        };
        Request::new(Prompt::Ids(prompt), 12, sampled(n.into()))
    };
    let whole: Vec<_> = (0..9).map(|n| run(&fresh.engine, &ask(n)).0).collect();
    for bytes in [1 << 30, 400_000, 1] {
        let kit = tiny(Budget::Unlimited);
        keeps(&kit, bytes);
        let made: Vec<_> = (0..9).map(|n| run(&kit.engine, &ask(n)).0).collect();
        for (made, whole) in made.iter().zip(&whole) {
            assert_eq!(answer(made), answer(whole), "{bytes}");
        }
        let stats = kit.engine.prefix_stats();
        assert!(stats.bytes <= bytes, "{stats:?}");
        let rows: usize = made.iter().map(|m| m.cached_tokens).sum();
        assert_eq!(stats.rows, rows as u64);
        if bytes == 1 << 30 {
            assert_eq!(made[1].cached_tokens, 150);
            assert_eq!(made[1].computed_rows, 20);
        }
        // At the same time, too.
        let engine = &kit.engine;
        let at_once: Vec<_> = std::thread::scope(|scope| {
            let asks: Vec<_> = (0..9)
                .map(|n| scope.spawn(move || run(engine, &ask(n)).0))
                .collect();
            asks.into_iter().map(|ask| ask.join().unwrap()).collect()
        });
        for (made, whole) in at_once.iter().zip(&whole) {
            assert_eq!(answer(made), answer(whole), "{bytes}");
        }
    }
}

/// Keeps everything, as a disk would.
#[derive(Default)]
struct Shelf(Mutex<Vec<Arc<Start>>>);

impl StateStore for Shelf {
    fn load(&self, ids: &[TokenId], longer_than: usize) -> Option<Arc<Start>> {
        let shelf = self.0.lock().unwrap();
        let serves = |s: &&Arc<Start>| {
            s.ids.len() > longer_than && s.ids.len() < ids.len() && ids.starts_with(&s.ids)
        };
        shelf
            .iter()
            .filter(serves)
            .max_by_key(|s| s.ids.len())
            .cloned()
    }

    fn save(&self, start: &Arc<Start>) {
        self.0.lock().unwrap().push(Arc::clone(start));
    }
}

#[test]
fn what_a_store_has_kept_serves_another_engine() {
    let shelf = Arc::new(Shelf::default());
    let request = Request::new(Prompt::Ids(ids(1, 1_100)), 10, greedy());
    let mut made = Vec::new();
    for (round, cached) in [(0, 0), (1, 1_024)] {
        let kit = tiny(Budget::Unlimited);
        kit.engine.set_prefixes(Prefixes {
            bytes: 0,
            every_tokens: Some(400),
            store: Some(Arc::clone(&shelf) as Arc<dyn StateStore>),
        });
        made.push(run(&kit.engine, &request).0);
        assert_eq!(
            made[round].cached_tokens, cached,
            "states at 512, 1,024, the end"
        );
    }
    assert_eq!(answer(&made[0]), answer(&made[1]));
}
