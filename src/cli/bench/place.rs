//! Where models come from and stores lie while they are measured.

use std::path::Path;
use std::path::PathBuf;
use std::sync::Arc;

use tempfile::TempDir;

use super::run::Ready;
use crate::cli::args::Bench;
use crate::cli::args::ModelArgs;
use crate::cli::args::PolicyArg;
use crate::cli::args::bench::Arm;
use crate::cli::args::bench::ArmFlags;
use crate::cli::env::Env;
use crate::cli::exit::CliError;
use crate::cli::setup;
use crate::share;
use crate::share::Link;
use crate::store::Budget;
use crate::terms::Bytes;
use crate::terms::RepoId;

/// What the only arm is called where none is named.
const PLAIN: &str = "plain";

/// Where models come from and stores lie.
pub(super) struct Place {
    /// Of stores that are made for this and removed.
    temporary: Option<TempDir>,
    source: Source,
    home: PathBuf,
}

enum Source {
    Demo,
    Folder(PathBuf, RepoId),
    Named,
}

impl Place {
    pub(super) fn new(args: &Bench) -> Result<Place, CliError> {
        let folder = Path::new(&args.model);
        let source = if args.model == "demo" {
            Source::Demo
        } else if folder.join("config.json").is_file() {
            let name = setup::local_name(folder);
            let repo = name
                .parse()
                .map_err(|error| CliError::Usage(format!("--model: {error}"), None))?;
            Source::Folder(folder.to_owned(), repo)
        } else {
            Source::Named
        };
        let temporary = match (&args.place.home, &source) {
            (Some(_), _) | (None, Source::Named) => None,
            _ => {
                let mut builder = tempfile::Builder::new();
                let made = builder.prefix("deltafin-bench-").tempdir();
                Some(made.map_err(|source| CliError::File {
                    path: std::env::temp_dir().display().to_string(),
                    source,
                })?)
            }
        };
        let home = match &temporary {
            Some(temporary) => temporary.path().to_owned(),
            None => setup::home(&args.store(args.place.home.clone(), None), &Env::read())?,
        };
        Ok(Place {
            temporary,
            source,
            home,
        })
    }

    pub(super) fn arms(&self, args: &Bench) -> Result<Vec<Ready>, CliError> {
        let plain = Arm {
            name: PLAIN.to_owned(),
            flags: String::new(),
        };
        let typed = match args.arms.is_empty() {
            true => std::slice::from_ref(&plain),
            false => &args.arms,
        };
        let mut served: Vec<(Option<Link>, Arc<share::Server>)> = Vec::new();
        let mut ready: Vec<Ready> = Vec::new();
        for arm in typed {
            if ready.iter().any(|other| other.name == arm.name) {
                let text = format!("--arm: two are called `{}`", arm.name);
                return Err(CliError::Usage(text, None));
            }
            let meant = arm
                .over(&args.flags)
                .map_err(|text| CliError::Usage(text, None))?;
            let server = match served.iter().find(|(link, _)| *link == meant.shape) {
                Some((_, server)) => Some(Arc::clone(server)),
                None => self.serve(meant.shape)?.map(Arc::new),
            };
            if let Some(server) = &server {
                served.push((meant.shape, Arc::clone(server)));
            }
            let home = self.home_of(&meant, args)?;
            ready.push(Ready {
                name: arm.name.clone(),
                flags: arm.flags.clone(),
                model: self.model(args, &meant, &home, server.as_deref()),
                meant,
                home,
                env: match self.source {
                    Source::Demo => Env::default(),
                    _ => Env::read(),
                },
                _served: server,
            });
        }
        Ok(ready)
    }

    /// The demo is always served; a folder only if the link is to be shaped.
    fn serve(&self, link: Option<Link>) -> Result<Option<share::Server>, CliError> {
        let options = share::ShareOptions {
            link,
            ..share::ShareOptions::default()
        };
        match &self.source {
            Source::Demo => Ok(Some(setup::start_demo(options)?)),
            Source::Folder(folder, repo) if link.is_some() => {
                let backend = Arc::new(share::Folder::open(repo.clone(), folder)?);
                let address = ([127, 0, 0, 1], 0).into();
                Ok(Some(share::Server::start(address, backend, options)?))
            }
            Source::Named if link.is_some() => Err(CliError::Usage(
                "--shape: only what is served here can be shaped: the demo, or a model's folder"
                    .to_owned(),
                Some("--rate limits what comes from a hub".to_owned()),
            )),
            _ => Ok(None),
        }
    }

    /// A store of its own for each budget and policy, where stores are made for this; else the one there is, if nothing in it would
    /// have to go.
    fn home_of(&self, flags: &ArmFlags, args: &Bench) -> Result<PathBuf, CliError> {
        if self.temporary.is_some() {
            return Ok(self.home.join(match (flags.cache, flags.policy) {
                (None | Some(Budget::Unlimited), _) => "whole".to_owned(),
                (Some(Budget::Limit(bytes)), None | Some(PolicyArg::Lru)) => {
                    format!("cache-{bytes}")
                }
                (Some(Budget::Limit(bytes)), Some(PolicyArg::Lfu)) => format!("cache-{bytes}-lfu"),
            }));
        }
        if let Some(Budget::Limit(bytes)) = flags.cache {
            let held = setup::look(&args.store(Some(self.home.clone()), None))?;
            let held = held.stats().bytes;
            if held > bytes {
                return Err(CliError::Usage(
                    format!(
                        "--cache {}: {} holds {} of experts, which a measurement may not remove",
                        Bytes(bytes),
                        self.home.display(),
                        Bytes(held)
                    ),
                    Some(
                        "give another --home, where the core is then fetched once more".to_owned(),
                    ),
                ));
            }
        }
        Ok(self.home.clone())
    }

    fn model(
        &self,
        args: &Bench,
        flags: &ArmFlags,
        home: &Path,
        served: Option<&share::Server>,
    ) -> ModelArgs {
        let own = self.temporary.is_some();
        let cache = flags.cache.or(own.then_some(Budget::Unlimited));
        let mut store = args.store(Some(home.to_owned()), cache);
        store.policy = flags.policy;
        if own {
            store.reserve = store.reserve.or(Some(Bytes(0)));
        }
        ModelArgs {
            model: Some(match &self.source {
                Source::Demo => share::Embedded::REPO.to_owned(),
                Source::Folder(_, repo) => repo.to_string(),
                Source::Named => args.model.clone(),
            }),
            revision: args.revision.clone(),
            update: served.is_some(),
            hub: match (served, &self.source) {
                (Some(server), _) => vec![server.url()],
                (None, Source::Folder(folder, _)) => vec![folder.display().to_string()],
                _ => args.hub.clone(),
            },
            offline: args.offline,
            rate: flags.rate,
            max_bytes: args.max_bytes,
            store,
        }
    }
}
