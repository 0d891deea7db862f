//! Policies and how they decide.

use crate::{
    AddressClass, AllowEntry, Claimed, Decision, Destination, Name, NamePattern, Ports, Protocol, Target, classify,
};
use serde::{Deserialize, Serialize};
use std::{fmt, net::IpAddr};

const PRIVATE_ADDRESS: &str = "private address";
const NO_RULE: &str = "no rule allows it";

/// The starting point of a policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Preset {
    /// Nothing.
    Off,
    /// TCP 80 and 443 to public addresses.
    Web,
    /// TCP on every port to public addresses.
    Full,
    /// The package registries that the host's own clients use.
    Registries,
    /// Only what the rules list.
    AllowList,
}

impl Preset {
    /// Its name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Web => "web",
            Self::Full => "full",
            Self::Registries => "registries",
            Self::AllowList => "allow-list",
        }
    }
}

/// Allow or deny.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Let through.
    Allow,
    /// Refuse.
    Deny,
}

/// One rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rule {
    /// What it does.
    pub action: Action,
    /// To what.
    pub entry: AllowEntry,
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let action = if self.action == Action::Allow { "allow" } else { "deny" };
        write!(f, "{action} {}", self.entry)
    }
}

/// How a registry is spoken to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scheme {
    /// Cleartext.
    Http,
    /// TLS.
    Https,
}

/// A host from which package clients download.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RegistryHost {
    /// Its exact name.
    pub host: Name,
    /// Its port.
    pub port: u16,
    /// How it is spoken to.
    pub scheme: Scheme,
    /// Whether it resolves to non-public addresses on this host, as a company's mirror does; it then becomes one of the
    /// policy's private names.
    #[serde(default)]
    pub private: bool,
}

/// Exact host names that may resolve to non-public addresses, each on its port. They open nothing by themselves: a rule
/// must allow the name as well.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PrivateNames(Vec<(Name, u16)>);

impl PrivateNames {
    /// Adds a name on a port.
    pub fn add(&mut self, name: Name, port: u16) {
        if !self.permits(&name, port) {
            self.0.push((name, port));
        }
    }

    /// Whether `name` may be at a non-public address on `port`.
    #[must_use]
    pub fn permits(&self, name: &Name, port: u16) -> bool {
        self.0.iter().any(|(n, p)| n == name && *p == port)
    }

    /// Whether `name` may be at a non-public address on any port.
    #[must_use]
    pub fn contains(&self, name: &Name) -> bool {
        self.0.iter().any(|(n, _)| n == name)
    }
}

/// What a sandbox may reach.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Stored", into = "Stored")]
pub struct Policy {
    preset: Preset,
    rules: Vec<Rule>,
    registries: Vec<RegistryHost>,
    private_names: PrivateNames,
    name: String,
}

/// How a policy is written down: without the name, which follows from the rest.
#[derive(Serialize, Deserialize)]
struct Stored {
    preset: Preset,
    #[serde(default)]
    rules: Vec<Rule>,
    #[serde(default)]
    registries: Vec<RegistryHost>,
    #[serde(default)]
    private_names: PrivateNames,
}

impl From<Stored> for Policy {
    fn from(s: Stored) -> Self {
        Self::build(s.preset, s.rules, s.registries, s.private_names)
    }
}

impl From<Policy> for Stored {
    fn from(p: Policy) -> Self {
        Self { preset: p.preset, rules: p.rules, registries: p.registries, private_names: p.private_names }
    }
}

impl Policy {
    /// Nothing leaves.
    #[must_use]
    pub fn off() -> Self {
        Self::of_preset(Preset::Off)
    }

    /// TCP 80 and 443 to public addresses.
    #[must_use]
    pub fn web() -> Self {
        Self::of_preset(Preset::Web)
    }

    /// TCP on every port to public addresses.
    #[must_use]
    pub fn full() -> Self {
        Self::of_preset(Preset::Full)
    }

    /// Only what the entries name.
    #[must_use]
    pub fn allow_list(entries: Vec<AllowEntry>) -> Self {
        let rules = entries.into_iter().map(|entry| Rule { action: Action::Allow, entry }).collect();
        Self::build(Preset::AllowList, rules, Vec::new(), PrivateNames::default())
    }

    /// Only these registries. Those that resolve to non-public addresses become private names.
    #[must_use]
    pub fn registries(hosts: Vec<RegistryHost>) -> Self {
        let mut private = PrivateNames::default();
        for host in hosts.iter().filter(|h| h.private) {
            private.add(host.host.clone(), host.port);
        }
        Self::build(Preset::Registries, Vec::new(), hosts, private)
    }

    fn of_preset(preset: Preset) -> Self {
        Self::build(preset, Vec::new(), Vec::new(), PrivateNames::default())
    }

    fn build(preset: Preset, rules: Vec<Rule>, registries: Vec<RegistryHost>, private_names: PrivateNames) -> Self {
        let mut policy = Self { preset, rules, registries, private_names, name: String::new() };
        policy.rename();
        policy
    }

    fn rename(&mut self) {
        let preset = self.preset.as_str();
        self.name = match (self.preset, self.rules.len()) {
            (Preset::AllowList, _) | (_, 0) => preset.to_owned(),
            (_, 1) => format!("{preset} + 1 rule"),
            (_, n) => format!("{preset} + {n} rules"),
        };
    }

    /// Opens something on top of the preset; it comes after the rules that are there.
    pub fn allow(&mut self, entry: AllowEntry) {
        self.rules.push(Rule { action: Action::Allow, entry });
        self.rename();
    }

    /// Closes something; it comes before the rules that are there. Without a port it means every port: who writes a
    /// host into a deny rule means the host. In the presets that allow every public address a name can be denied only
    /// where the connection shows it; deny the address range as well.
    pub fn deny(&mut self, mut entry: AllowEntry) {
        if entry.ports == Ports::Web {
            entry.ports = Ports::Any;
        }
        self.rules.insert(0, Rule { action: Action::Deny, entry });
        self.rename();
    }

    /// Lets an exact name be at a non-public address on `port` (443, or a registry's own port).
    pub fn allow_private_name(&mut self, name: Name, port: u16) {
        self.private_names.add(name, port);
    }

    /// The preset it starts from.
    #[must_use]
    pub fn preset(&self) -> Preset {
        self.preset
    }

    /// The rules in front of the preset, in order.
    #[must_use]
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// The registries of the preset of that name.
    #[must_use]
    pub fn registry_hosts(&self) -> &[RegistryHost] {
        &self.registries
    }

    /// Names that may be at non-public addresses.
    #[must_use]
    pub fn private_names(&self) -> &PrivateNames {
        &self.private_names
    }

    /// What people call it: `off`, `web`, `registries`, `allow-list`, `registries + 2 rules`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether it lets nothing out at all.
    #[must_use]
    pub fn is_off(&self) -> bool {
        self.preset == Preset::Off && !self.rules.iter().any(|r| r.action == Action::Allow)
    }

    /// Whether any name may be looked up, given the rules that name it.
    fn preset_allows_any_name(&self) -> bool {
        matches!(self.preset, Preset::Web | Preset::Full)
    }

    fn preset_rule(&self) -> String {
        format!("preset {}", self.preset.as_str())
    }

    fn denied(&self) -> Decision {
        match self.preset {
            Preset::Off if self.is_off() => Decision::deny(self.preset_rule(), "the policy lets nothing out"),
            _ => Decision::deny(NO_RULE, format!("no rule of the policy {} allows it", self.name)),
        }
    }

    /// May this name be looked up?
    pub fn decide_name(&self, name: &Name) -> Decision {
        for rule in &self.rules {
            let Target::Name(pattern) = &rule.entry.target else { continue };
            if !pattern.covers(name) {
                continue;
            }
            match rule.action {
                Action::Allow => return Decision::allow(rule.to_string(), "a rule names it"),
                // A deny of some ports leaves the others, so the lookup stays.
                Action::Deny if rule.entry.ports == Ports::Any => {
                    return Decision::deny(rule.to_string(), "a rule denies it");
                }
                Action::Deny => {}
            }
        }
        if let Some(host) = self.registries.iter().find(|h| h.host == *name) {
            return Decision::allow(registry_rule(host), "a package registry of the host");
        }
        if self.preset_allows_any_name() {
            return Decision::allow(self.preset_rule(), "the preset allows every name");
        }
        self.denied()
    }

    /// May this address be given out for a name that may be looked up?
    pub fn decide_answer(&self, name: &Name, address: IpAddr) -> Decision {
        let class = classify(address);
        if class == AddressClass::Public {
            return Decision::allow("public address", "the address is public");
        }
        if self.private_names.contains(name) {
            return Decision::allow("private name", format!("{name} is listed as a private name"));
        }
        match self.opening_range(address, None) {
            Some(rule) => Decision::allow(rule.to_string(), "a rule opens this range"),
            None => Decision::deny(
                PRIVATE_ADDRESS,
                format!("{name} is at the {} address {address}, which no rule opens", class.as_str()),
            ),
        }
    }

    fn opening_range(&self, address: IpAddr, port: Option<u16>) -> Option<&Rule> {
        self.rules.iter().find(|rule| {
            let Target::Range(range) = &rule.entry.target else { return false };
            rule.action == Action::Allow
                && port.is_none_or(|p| rule.entry.ports.contains(p))
                && range.contains(address)
                && range.opens(address)
        })
    }

    /// May this connection go out?
    pub fn decide_connection(&self, to: &Destination<'_>) -> Decision {
        let mut missed = None;
        for rule in &self.rules {
            if !rule.entry.ports.contains(to.port) {
                continue;
            }
            match (&rule.entry.target, rule.action) {
                (Target::Name(pattern), Action::Deny) => {
                    if known_names(to).any(|name| pattern.covers(name)) {
                        return Decision::deny(rule.to_string(), "a rule denies it");
                    }
                }
                (Target::Range(range), Action::Deny) => {
                    if range.contains(to.addr) {
                        return Decision::deny(rule.to_string(), "a rule denies it");
                    }
                }
                (Target::Name(pattern), Action::Allow) => match self.allow_by_name(pattern, rule.to_string(), to) {
                    Some(decision) if decision.allow => return decision,
                    Some(decision) => keep_first(&mut missed, decision),
                    None => {}
                },
                (Target::Range(range), Action::Allow) => {
                    if !range.contains(to.addr) || to.synthetic {
                        continue;
                    }
                    let own = to.host_own && !range.is_single();
                    if range.opens(to.addr) && !own {
                        return Decision::allow(rule.to_string(), "a rule opens this range");
                    }
                    keep_first(&mut missed, refused_class(to));
                }
            }
        }
        self.decide_by_preset(to, missed)
    }

    fn decide_by_preset(&self, to: &Destination<'_>, mut missed: Option<Decision>) -> Decision {
        for host in self.registries.iter().filter(|h| h.port == to.port) {
            match self.allow_by_name(&NamePattern::exact(host.host.clone()), registry_rule(host), to) {
                Some(decision) if decision.allow => return decision,
                Some(decision) => keep_first(&mut missed, decision),
                None => {}
            }
        }
        let ports = match self.preset {
            Preset::Web => Some(Ports::Web),
            Preset::Full => Some(Ports::Any),
            _ => None,
        };
        if ports.is_some_and(|p| p.contains(to.port)) {
            if self.may_be_at(to, agreed_names(to).unwrap_or_default()) {
                return Decision::allow(self.preset_rule(), "a public address");
            }
            keep_first(&mut missed, refused_class(to));
        }
        missed.unwrap_or_else(|| self.denied())
    }

    /// What an allow rule for a name says: nothing if it is about other names; a deny when the name is right and
    /// something else is not.
    fn allow_by_name(&self, pattern: &NamePattern, rule: String, to: &Destination<'_>) -> Option<Decision> {
        match agreed_names(to) {
            Ok(names) => {
                let name = names.iter().find(|name| pattern.covers(name))?;
                if self.may_be_at(to, std::slice::from_ref(name)) {
                    Some(Decision::allow(rule, format!("{name} agrees with its DNS answer")))
                } else {
                    Some(refused_class(to))
                }
            }
            Err(reason) => known_names(to).any(|name| pattern.covers(name)).then(|| Decision::deny(NO_RULE, reason)),
        }
    }

    /// Whether one of `names` may be at the destination's kind of address.
    fn may_be_at(&self, to: &Destination<'_>, names: &[Name]) -> bool {
        let plain = !to.host_own && classify(to.addr) == AddressClass::Public;
        plain || to.synthetic || names.iter().any(|name| self.private_names.permits(name, to.port))
    }

    /// The refusal of a connection to which no claim could open the way, so that it need not be listened to first.
    pub fn decide_before_hearing(
        &self,
        addr: IpAddr,
        port: u16,
        names: &[Name],
        synthetic: bool,
        own: bool,
    ) -> Option<Decision> {
        let unheard = Destination {
            addr,
            port,
            names_from_dns: names,
            claimed: None,
            protocol: Protocol::Opaque,
            synthetic,
            host_own: own,
        };
        let decision = self.decide_connection(&unheard);
        let could = |name: &Name| {
            let claimed = Claimed::Sni(name.clone());
            self.decide_connection(&Destination { claimed: Some(&claimed), protocol: Protocol::Tls, ..unheard }).allow
        };
        if decision.allow || names.iter().any(could) { None } else { Some(decision) }
    }
}

fn registry_rule(host: &RegistryHost) -> String {
    format!("registries {}:{}", host.host, host.port)
}

fn keep_first(missed: &mut Option<Decision>, decision: Decision) {
    missed.get_or_insert(decision);
}

fn refused_class(to: &Destination<'_>) -> Decision {
    let class = if to.host_own { "host's own" } else { classify(to.addr).as_str() };
    Decision::deny(PRIVATE_ADDRESS, format!("{} is a {class} address, which no rule opens", to.addr))
}

/// Every name that has anything to do with the connection.
fn known_names<'a>(to: &Destination<'a>) -> impl Iterator<Item = &'a Name> {
    to.names_from_dns.iter().chain(to.claimed.map(Claimed::name))
}

/// The names that count for the connection: the claimed one where DNS answer and claim agree; those of the DNS answer
/// where the protocol claims none; or why there are none.
fn agreed_names<'a>(to: &Destination<'a>) -> Result<&'a [Name], String> {
    let names = to.names_from_dns;
    if to.protocol == Protocol::TlsEch {
        return Err("the encrypted client hello hides the name that is meant".to_owned());
    }
    if let Some(claimed) = to.claimed {
        let kind = if matches!(claimed, Claimed::Sni(_)) { "TLS server name" } else { "HTTP Host" };
        let claimed = claimed.name();
        return match names.iter().find(|name| *name == claimed) {
            Some(name) => Ok(std::slice::from_ref(name)),
            None if names.is_empty() => {
                Err(format!("the {kind} is {claimed}, but no DNS answer gave out {} for it", to.addr))
            }
            None => Err(format!("the {kind} is {claimed}, but {} was given out for {}", to.addr, names[0])),
        };
    }
    match to.protocol {
        Protocol::Tls | Protocol::TlsEch => Err("TLS without a server name".to_owned()),
        Protocol::Http => Err("an HTTP request without a valid Host".to_owned()),
        Protocol::HttpTwo => Err("HTTP/2 without TLS can't be judged request by request".to_owned()),
        Protocol::Opaque | Protocol::Silent if matches!(to.port, 80 | 443) => {
            Err(format!("neither TLS nor HTTP on port {}", to.port))
        }
        Protocol::Opaque | Protocol::Silent if names.is_empty() => {
            Err(format!("no DNS answer gave out the address {}", to.addr))
        }
        Protocol::Opaque | Protocol::Silent => Ok(names),
    }
}

#[cfg(test)]
mod tests;
