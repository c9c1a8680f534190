//! A prefix from one store in another: not only the same tokens, the same bits.

use std::sync::Arc;

use deltafin::engine::Prompt;
use deltafin::engine::Request;
use deltafin::engine::Snapshots;
use deltafin::jobs::Identity;
use deltafin::jobs::Prefixes;
use serde_json::json;

use crate::kit;

#[test]
fn an_imported_prefix_gives_the_logits_of_a_fresh_prefill_to_the_bit() {
    let (here, there, fresh) = (kit::trained(), kit::trained(), kit::trained());
    let text = kit::ids(3, 700);
    for len in [1, 63, 512, 600, 699] {
        let prefix = &text[..len];
        let read = Request {
            snapshots: Snapshots {
                at_prompt_end: true,
                ..Snapshots::default()
            },
            ..Request::new(Prompt::Ids(prefix.to_vec()), 1, kit::greedy())
        };
        let (_, heard) = kit::run(&here.engine, &read);
        let state = heard.states.iter().find(|state| state.ids == prefix);
        let state = state.unwrap();
        let identity = Identity::of(&here.engine);
        let (ours, theirs) = (
            Prefixes::open(here.home.path()),
            Prefixes::open(there.home.path()),
        );
        ours.keep("p", &identity, json!({}), prefix, &state.sequence)
            .unwrap();
        let file = here.home.path().join("out.prefix");
        ours.export("p", &file).unwrap();
        theirs.import("p", &file).unwrap();

        let whole = Request::new(Prompt::Ids(text.clone()), 4, kit::sampled(5));
        let (wanted, bits) = kit::run(&fresh.engine, &whole);
        let engine = &there.engine;
        let loaded = theirs.start_for(&text, &Identity::of(engine), engine.spec());
        assert!(loaded.refused.is_empty(), "{:?}", loaded.refused);
        let start = loaded.start.unwrap();
        assert_eq!(start.ids, prefix);
        let short = Request {
            start: Some(Arc::new(start)),
            ..whole
        };
        let (made, heard) = kit::run(engine, &short);
        assert_eq!((made.cached_tokens, made.computed_rows), (len, 700 - len));
        assert!(heard.logits[0] == bits.logits[0], "{len}: the first bits");
        assert!(heard.logits == bits.logits, "{len}: those after them");
        assert_eq!(kit::answer(&made), kit::answer(&wanted), "{len}");
    }
}
